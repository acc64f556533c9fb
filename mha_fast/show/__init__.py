"""What only shows: a real network, pictures, and the command line. Nothing else imports it."""
