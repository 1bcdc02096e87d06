// Checks and times the expert kernels without Rust.
//
//   experts check [small [format]|model] correctness against f64, determinism, corner cases; small: few cases, for sanitizers
//   experts few [small [format]|model]     the part of check that is about experts with few rows
//   experts bench [models|all] [tokens] [ranks]  time, bandwidth and rate with the floor, at the load of one rank of
//                                                `ranks` (default 4); tokens 0: several numbers of tokens
//   experts tune [models|all] [tokens] [ranks]    as bench, for every tile shape
//
// README.md in this folder says how to build it.
#include "bench.cuh"
#include "check.cuh"

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "check";
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        std::printf("no CUDA device\n");
        return 2;
    }
    CHECK(expertd_experts_setup());
    if (mode == "check") {
        const bool small = argc > 2 && std::strcmp(argv[2], "small") == 0;
        return check_all(small, argc > 2 && !small ? argv[2] : nullptr, small && argc > 3 ? std::atoi(argv[3]) : -1);
    }
    if (mode == "few") {
        const bool small = argc > 2 && std::strcmp(argv[2], "small") == 0;
        const bool good = check_few_rows(argc > 2 && !small ? argv[2] : nullptr, small, small && argc > 3 ? std::atoi(argv[3]) : -1);
        std::printf(good ? "ALL GOOD\n" : "SOME FAILED\n");
        return good ? 0 : 1;
    }
    if (mode != "bench" && mode != "tune") {
        std::printf("usage: experts check [small [format]|model] | few [small [format]|model] | bench [models|all] [tokens] [ranks] | tune [models|all] [tokens] [ranks]\n");
        return 64;
    }
    if (argc > 4) ranks = std::max(1, std::atoi(argv[4]));
    measure_ceiling();
    const char* flags = std::getenv("EXPERTS_FLAGS"); // sums of enum ExpertdLaunchFlags, separated by commas
    for (const Model& m : MODELS) {
        const std::string wanted = argc > 2 ? "," + std::string(argv[2]) + "," : "all"; // names separated by commas
        if (wanted != "all" && wanted != ",all," && wanted.find("," + std::string(m.name) + ",") == std::string::npos) continue;
        bench_model(m, mode == "tune", flags ? flags : "0", argc > 3 ? argv[3] : nullptr);
    }
    return 0;
}
