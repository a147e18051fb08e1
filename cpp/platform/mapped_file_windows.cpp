// Windows does not let anyone replace a file that is mapped, so files are read instead.
#include "platform/mapped_file.hpp"

namespace entropykv {

std::shared_ptr<MappedFile> MappedFile::map(int, std::size_t, std::size_t) { return nullptr; }

MappedFile::~MappedFile() = default;

bool MappedFile::has_changed() noexcept { return changed_; }

void MappedFile::let_go() noexcept {}

void MappedFile::forget_file() noexcept { file_ = watch_ = -1; }

MappedFile::Version MappedFile::version_of(int) noexcept { return {}; }

}  // namespace entropykv
