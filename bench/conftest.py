"""What the benchmark runs add to pytest-benchmark's report."""

from .machine import describe


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["mha_fast"] = describe()
