// The table of this instruction set: included last, after the kernels that it names.
constexpr foredraft::KernelSet kernel_set(const char* name) {
    return {
        .name = name,
        .quantize_rows = quantize_rows,
        .matmul = matmul,
        .attention = attention,
        .store_kv = store_kv,
        .rms_norm = rms_norm,
        .rope = rope,
        .silu_mul = silu_mul,
        .gelu_tanh_mul = gelu_tanh_mul,
        .add = add,
        .softcap = softcap,
        .argmax = argmax,
        .max_value = max_value,
        .exp_sum = exp_sum,
        .gather = gather,
        .excess_sums = excess_sums,
        .race = race,
    };
}
