// The weights of a folder that a stranger made: headers and indexes end in a typed error, or in
// tensors whose bytes are those of the file. Input: a byte of choice; then model.safetensors, or an
// index beside a file that is sound.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include <unistd.h>

#include "smartinf/base/check.h"
#include "smartinf/model/safetensors.h"
#include "smartinf/model/weight_files.h"

namespace {

using namespace smartinf;
constexpr const char* kShard = "/model-00001-of-00001.safetensors";

model::Architecture tiny() {
  model::Architecture model;
  model.layers = model.heads = model.kv_heads = 1;
  model.width = model.head_width = 2;
  model.mlp_width = 1;
  model.vocabulary = 2;
  model.windows = {0};
  return model;
}

/// A folder in memory for as long as the process runs.
class Folder {
 public:
  Folder() {
    std::string path = std::filesystem::exists("/dev/shm") ? "/dev/shm/safetensors_fuzz_XXXXXX"
                                                           : "/tmp/safetensors_fuzz_XXXXXX";
    SI_CHECK(::mkdtemp(path.data()) != nullptr, "no folder for the files");
    path_ = path;
    std::vector<model::TensorInfo> tensors;
    for (const model::Tensor& tensor : model::tensors_of(tiny())) {
      tensors.push_back({tensor.name, base::DataType::kF32, tensor.shape});
    }
    auto writer = model::SafetensorsWriter::create(path_ + kShard, tensors, {});
    SI_CHECK(writer.ok(), "no room");
    for (const model::TensorInfo& tensor : tensors) {
      SI_CHECK(writer->append(std::vector<std::byte>(tensor.bytes())).ok(), "no room");
    }
    SI_CHECK(writer->finish().ok(), "no room");
  }
  ~Folder() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }
  std::string write(const char* name, std::string_view bytes) const {
    const std::string path = path_ + name;
    std::FILE* out = std::fopen(path.c_str(), "wb");
    SI_CHECK(out != nullptr && std::fwrite(bytes.data(), 1, bytes.size(), out) == bytes.size(),
             "no room");
    std::fclose(out);
    return path;
  }

 private:
  std::string path_;
};

void check_header(const std::string& path) {
  const auto file = base::DataFile::open(path);
  SI_CHECK(file.ok(), "the file was just written");
  const auto header = model::SafetensorsHeader::read(*file);
  if (!header.ok()) return;
  uint64_t begin = file->size();
  uint64_t bytes = 0;
  for (const auto& [name, entry] : header->tensors) {
    begin = std::min(begin, entry.offset);
    bytes += entry.bytes;
  }
  SI_CHECK(begin + bytes == file->size(), "tensors that are not the file's bytes");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  const bool index = (data[0] & 1u) != 0;
  const std::string path =
      folder.write(index ? "/model.safetensors.index.json" : "/model.safetensors", input);
  if (!index) check_header(path);
  const auto files = model::WeightFiles::open(folder.path(), tiny());
  if (files.ok()) {
    std::vector<float> values(model::make_parameter_space(tiny())->count());
    // Both refuse weights that are not finite, and nothing else.
    const bool read = files->read(0, values).ok();
    SI_CHECK(files->bytes() > 0 && files->digest().ok() == read, "a digest of other weights");
  }
  std::filesystem::remove(path);
  return 0;
}
