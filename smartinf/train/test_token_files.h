// Token files for tests, also wrong ones.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace smartinf::train {

/// A safetensors file piece by piece, so that a test can make it wrong.
struct TestTokenFile {
  struct Tensor {
    std::string name;
    std::string type;
    uint64_t count;
    std::string bytes;
  };
  std::vector<Tensor> tensors;
  nlohmann::json metadata = {{"token_file", "1"}};

  template <typename T>
  TestTokenFile& add(const std::string& name, const std::string& type, const std::vector<T>& of) {
    tensors.push_back(
        {name, type, of.size(), {reinterpret_cast<const char*>(of.data()), of.size() * sizeof(T)}});
    return *this;
  }

  /// Tokens 0, 1, 2... below `vocabulary`, in documents of these lengths; every third token of each
  /// counts where `masked`.
  static TestTokenFile documents(const std::vector<uint64_t>& lengths, uint16_t vocabulary,
                                 bool masked) {
    std::vector<uint64_t> starts;
    std::vector<uint16_t> tokens;
    std::vector<uint8_t> mask;
    for (const uint64_t length : lengths) {
      starts.push_back(tokens.size());
      for (uint64_t i = 0; i < length; ++i) {
        mask.push_back(i % 3 == 1 ? 1 : 0);
        tokens.push_back(static_cast<uint16_t>(tokens.size() % vocabulary));
      }
    }
    TestTokenFile file;
    file.add("document_starts", "U64", starts).add("tokens", "U16", tokens);
    if (masked) file.add("loss_mask", "U8", mask);
    file.metadata["vocabulary"] = std::to_string(vocabulary);
    return file;
  }

  nlohmann::json header() const {
    nlohmann::json header = {{"__metadata__", metadata}};
    uint64_t at = 0;
    for (const Tensor& tensor : tensors) {
      header[tensor.name] = {{"dtype", tensor.type},
                             {"shape", {tensor.count}},
                             {"data_offsets", {at, at + tensor.bytes.size()}}};
      at += tensor.bytes.size();
    }
    return header;
  }

  void write(const std::filesystem::path& path) const { write(path, header().dump()); }
  void write(const std::filesystem::path& path, const std::string& header) const {
    const uint64_t length = header.size();
    std::ofstream out(path, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), sizeof length);
    out << header;
    for (const Tensor& tensor : tensors) out << tensor.bytes;
  }
};

}  // namespace smartinf::train
