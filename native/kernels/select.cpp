#include "kernels/select.h"

#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace foredraft {

extern const KernelSet kPortableKernels;
#if defined(__x86_64__)
extern const KernelSet kAvx512Kernels;
extern const KernelSet kAvxVnniKernels;
extern const KernelSet kAvx2Kernels;
#elif defined(__aarch64__)
extern const KernelSet kNeonKernels;
#endif

#if defined(__x86_64__)
// Two that not every compiler's __builtin_cpu_supports knows.
static bool has_f16c() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
static bool has_avx_vnni() {
    constexpr unsigned kAvxVnni = 1u << 4;
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kAvxVnni);
}
#endif

// __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
std::vector<const KernelSet*> runnable_kernel_sets() {
    std::vector<const KernelSet*> sets;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        sets.push_back(&kAvx512Kernels);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
        if (has_avx_vnni()) sets.push_back(&kAvxVnniKernels);
        sets.push_back(&kAvx2Kernels);
    }
#elif defined(__aarch64__)
#if defined(__linux__)
    constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP
    if (getauxval(AT_HWCAP) & kDotProduct) sets.push_back(&kNeonKernels);
#else
    sets.push_back(&kNeonKernels);  // every Apple processor since 2018, and the only ones this is built for
#endif
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
