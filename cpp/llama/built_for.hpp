// Checks that the libraries match the headers that this extension was compiled with. The
// extension reads and changes llama.cpp's structures in memory, so even a small difference could
// corrupt them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace entropykv {

// Returns what differs in the loaded ggml and llama.cpp, for example "GGML_OP_GLU is called UNARY";
// empty if nothing does.
std::vector<std::string> differences();

// Describes a structure that Python passes to llama.cpp, as the headers declare it.
struct StructLayout {
    const char* name;
    std::size_t size;
    const char* field;
    std::size_t offset;
};
std::vector<StructLayout> struct_layouts();

// Returns the version of llama.cpp's sequence states; files with another version cannot be read.
int sequence_state_version();

}  // namespace entropykv
