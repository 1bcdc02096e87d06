// The modules of a path. Each source is a module, which the runtime loads when one of its kernels is needed first. Kernels wait for each
// other and for the host, and loading may wait for kernels, so ranks load all modules of their path before they start.
#pragma once

namespace expertd {

// Names a module by any of its kernels. A source has one as a constant.
class Module {
  public:
    explicit Module(const void* kernel);

  private:
    friend int load_modules();
    const void* kernel_;
    const Module* next_;
};

}  // namespace expertd

// Loads all modules of the path; returns a cudaError_t.
extern "C" int expertd_load_modules(void);
