#include "llama/built_for.hpp"

#include <ggml.h>
#include <llama.h>

#include <cstddef>
#include <cstring>

namespace entropykv {
namespace {

// Repeats ggml's internal header of an object in a context, which no public header declares.
struct Object {
    std::size_t offset;
    std::size_t size;
    void* next;
    int type;
    char padding[4];
};

struct Named {
    const char* constant;
    const char* expected;
    const char* found;
};

#define ENTROPYKV_OP(name) \
    Named { "GGML_OP_" #name, #name, ggml_op_name(GGML_OP_##name) }

// Returns all operations and types of ggml that this folder uses. Of other numbers, ggml does not
// tell the names.
std::vector<Named> numbers() {
    return {ENTROPYKV_OP(NONE),
            ENTROPYKV_OP(ADD),
            ENTROPYKV_OP(MUL),
            ENTROPYKV_OP(CONCAT),
            ENTROPYKV_OP(MUL_MAT),
            ENTROPYKV_OP(MUL_MAT_ID),
            ENTROPYKV_OP(CPY),
            ENTROPYKV_OP(CONT),
            ENTROPYKV_OP(RESHAPE),
            ENTROPYKV_OP(VIEW),
            ENTROPYKV_OP(PERMUTE),
            ENTROPYKV_OP(TRANSPOSE),
            ENTROPYKV_OP(GET_ROWS),
            ENTROPYKV_OP(SET_ROWS),
            ENTROPYKV_OP(SOFT_MAX),
            ENTROPYKV_OP(ROPE),
            ENTROPYKV_OP(FLASH_ATTN_EXT),
            ENTROPYKV_OP(CUSTOM),
            ENTROPYKV_OP(GLU),
            {"GGML_GLU_OP_SWIGLU", "SWIGLU", ggml_glu_op_name(GGML_GLU_OP_SWIGLU)},
            {"GGML_TYPE_F32", "f32", ggml_type_name(GGML_TYPE_F32)},
            {"GGML_TYPE_F16", "f16", ggml_type_name(GGML_TYPE_F16)},
            {"GGML_TYPE_Q4_0", "q4_0", ggml_type_name(GGML_TYPE_Q4_0)},
            {"GGML_TYPE_Q4_1", "q4_1", ggml_type_name(GGML_TYPE_Q4_1)},
            {"GGML_TYPE_Q5_0", "q5_0", ggml_type_name(GGML_TYPE_Q5_0)},
            {"GGML_TYPE_Q5_1", "q5_1", ggml_type_name(GGML_TYPE_Q5_1)},
            {"GGML_TYPE_Q8_0", "q8_0", ggml_type_name(GGML_TYPE_Q8_0)},
            {"GGML_TYPE_Q4_K", "q4_K", ggml_type_name(GGML_TYPE_Q4_K)},
            {"GGML_TYPE_Q5_K", "q5_K", ggml_type_name(GGML_TYPE_Q5_K)},
            {"GGML_TYPE_Q6_K", "q6_K", ggml_type_name(GGML_TYPE_Q6_K)},
            {"GGML_TYPE_TQ1_0", "tq1_0", ggml_type_name(GGML_TYPE_TQ1_0)},
            {"GGML_TYPE_TQ2_0", "tq2_0", ggml_type_name(GGML_TYPE_TQ2_0)},
            {"GGML_TYPE_I8", "i8", ggml_type_name(GGML_TYPE_I8)},
            {"GGML_TYPE_I32", "i32", ggml_type_name(GGML_TYPE_I32)},
            {"GGML_TYPE_I64", "i64", ggml_type_name(GGML_TYPE_I64)}};
}

#undef ENTROPYKV_OP

}  // namespace

std::vector<std::string> differences() {
    std::vector<std::string> found;
    for (const Named& number : numbers())
        if (std::strcmp(number.expected, number.found) != 0)
            found.push_back(std::string(number.constant) + " is called " + number.found);
    const std::size_t tensor = ggml_tensor_overhead() - sizeof(Object);
    if (tensor != sizeof(ggml_tensor))
        found.push_back("a ggml_tensor has " + std::to_string(tensor) + " bytes instead of " +
                        std::to_string(sizeof(ggml_tensor)));
    return found;
}

std::vector<StructLayout> struct_layouts() {
    return {{"llama_context_params", sizeof(llama_context_params), "cb_eval",
             offsetof(llama_context_params, cb_eval)},
            {"llama_model_params", sizeof(llama_model_params), "n_gpu_layers",
             offsetof(llama_model_params, n_gpu_layers)}};
}

int sequence_state_version() { return LLAMA_STATE_SEQ_VERSION; }

}  // namespace entropykv
