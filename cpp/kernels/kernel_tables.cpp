// Lists the kernels, and computes how much scratch the prompt kernel needs.
#include "kernels/kernels.hpp"
#include "platform/instruction_sets.hpp"

namespace entropykv {

std::vector<const KernelTable*> available_kernels() {
    std::vector<const KernelTable*> tables{&kKernelsPortable};
#if defined(ENTROPYKV_X86)
    if (has_avx2()) tables.push_back(&kKernelsAvx2);
    if (has_avx512()) tables.push_back(&kKernelsAvx512);
    if (has_avx512_vnni()) tables.push_back(&kKernelsAvx512Vnni);
#elif defined(ENTROPYKV_ARM64)
    tables.push_back(&kKernelsNeon);
#endif
    return tables;
}

std::size_t prompt_scratch_floats(const PageLayout& layout) {
    const int entries = kEntryTile + kGroupEntries;  // a tile may start anywhere in a group
    const int values = layout.k_stride + layout.v_stride;
    const int rows = entries / 2 + 6;  // pairs of weights, and six arrays with one value per row
    return static_cast<std::size_t>(entries * (values + 1) + rows * kRowTile + kKeptFloats);
}

}  // namespace entropykv
