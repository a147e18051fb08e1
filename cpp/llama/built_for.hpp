// Whether the headers that this extension was compiled with are those of the libraries it runs
// with: it reads and changes llama.cpp's structures in memory, so that nothing may differ.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace entropykv {

// What the loaded ggml and llama.cpp have otherwise than the headers, such as "GGML_OP_GLU is
// called UNARY"; empty if all is as compiled.
std::vector<std::string> differences();

// A structure that Python passes to llama.cpp, as the headers have it.
struct StructLayout {
    const char* name;
    std::size_t size;
    const char* field;
    std::size_t offset;
};
std::vector<StructLayout> struct_layouts();

// Of what llama.cpp writes for a sequence: files with another one cannot be read.
int sequence_state_version();

}  // namespace entropykv
