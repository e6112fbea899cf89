#include "kernels/select.h"

#include <stdexcept>
#include <string>

namespace foredraft {

extern const KernelSet kPortableKernels;
#if defined(__x86_64__)
extern const KernelSet kAvx512Kernels;
extern const KernelSet kAvx2Kernels;
#endif

// __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
std::vector<const KernelSet*> runnable_kernel_sets() {
    std::vector<const KernelSet*> sets;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        sets.push_back(&kAvx512Kernels);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) sets.push_back(&kAvx2Kernels);
#endif
    sets.push_back(&kPortableKernels);
    return sets;
}

const KernelSet& select_kernels(const char* name_or_null) {
    const auto sets = runnable_kernel_sets();
    if (!name_or_null || !*name_or_null) return *sets.front();
    const std::string name = name_or_null;
    std::string names;
    for (const KernelSet* set : sets) {
        if (name == set->name) return *set;
        names += (names.empty() ? "" : ", ") + std::string(set->name);
    }
    throw std::invalid_argument("kernel set '" + name + "' cannot run here; choose one of: " + names);
}

}  // namespace foredraft
