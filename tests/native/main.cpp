// The checks as a program: cmake -DMHA_FAST_BUILD_CHECKS=ON.  tests/test_kernels.py loads them into Python instead.
extern "C" int run_checks(int argc, char **argv);

int main(int argc, char **argv) { return run_checks(argc, argv); }
