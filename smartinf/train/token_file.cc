#include "smartinf/train/token_file.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/text.h"
#include "smartinf/base/units.h"
#include "smartinf/model/safetensors.h"

namespace smartinf::train {
namespace {

using base::DataFile;
using base::ErrorCode;
using base::Result;
using base::Status;

// llm.c's token files: 256 little-endian int32 (magic, version, token count, zeros), then the
// tokens.
constexpr uint64_t kBinHeaderBytes = 256 * 4;
struct BinKind {
  int32_t magic;
  int32_t version;
  uint32_t token_bytes;
};
constexpr BinKind kBinKinds[] = {{20240520, 1, 2}, {20240801, 7, 4}};

constexpr uint64_t kVocabularyMax = uint64_t{1} << 24;
constexpr std::string_view kVersion = "1";
constexpr uint64_t kStartsAtOnce = base::kMiB / 8;

using Header = model::SafetensorsHeader;
using Tensor = Header::Entry;

Status corrupt(const std::string& path, std::string what, std::optional<uint64_t> offset = {}) {
  return Status(ErrorCode::kCorrupt, std::move(what), kTokenFileAdvice,
                base::ErrorPlace{path, offset, {}, 0});
}

Result<TokenFile> read_bin(std::shared_ptr<const DataFile> file) {
  const std::string& path = file->path();
  int32_t header[3] = {};
  if (file->size() < kBinHeaderBytes) {
    return corrupt(path, "the token file is shorter than its header");
  }
  SI_RETURN_IF_ERROR(file->read(0, std::as_writable_bytes(std::span(header))));
  for (const BinKind& kind : kBinKinds) {
    if (header[0] != kind.magic || header[1] != kind.version) continue;
    const uint64_t held = (file->size() - kBinHeaderBytes) / kind.token_bytes;
    if (header[2] < 0 || static_cast<uint64_t>(header[2]) != held) {
      return corrupt(path,
                     fmt::format("the token file's header says {} tokens, but its size says {}",
                                 header[2], held));
    }
    TokenFile out;
    out.tokens = {nullptr, std::move(file), kBinHeaderBytes, held, kind.token_bytes, path};
    return out;
  }
  return corrupt(path, fmt::format("not a token file: magic {} version {}", header[0], header[1]));
}

Status check_tensors(const DataFile& file, const Header& header) {
  for (const auto& [name, tensor] : header.tensors) {
    if (name != "tokens" && name != "loss_mask" && name != "document_starts") {
      return corrupt(file.path(), fmt::format("not a token file: it has a tensor \"{}\"",
                                              base::printable(name) ? name.substr(0, 80) : "?"));
    }
    if (tensor.shape.size() != 1) {
      return corrupt(file.path(), fmt::format("{} has {} extents", name, tensor.shape.size()));
    }
  }
  return Status();
}

Result<std::vector<uint64_t>> read_starts(const DataFile& file, const Tensor& tensor,
                                          uint64_t tokens) {
  std::vector<uint64_t> starts(tensor.shape[0]);
  for (uint64_t at = 0; at < starts.size(); at += kStartsAtOnce) {
    const auto some = std::span(starts).subspan(at, std::min(kStartsAtOnce, starts.size() - at));
    SI_RETURN_IF_ERROR(file.read(tensor.offset + at * 8, std::as_writable_bytes(some)));
  }
  const auto wrong = [&](uint64_t document, std::string_view why) {
    return corrupt(file.path(),
                   fmt::format("document_starts: document {} begins at token {}, {}", document,
                               starts[document], why),
                   tensor.offset + document * 8);
  };
  for (uint64_t document = 0; document < starts.size(); ++document) {
    if (document == 0 && starts[0] != 0) return wrong(0, "but the first one begins at 0");
    if (document > 0 && starts[document] <= starts[document - 1]) {
      return wrong(document, fmt::format("and the one before it at {}; they must ascend",
                                         starts[document - 1]));
    }
    if (starts[document] >= tokens) {
      return wrong(document, fmt::format("but there are {} tokens", tokens));
    }
  }
  return starts;
}

Result<uint32_t> parse_vocabulary(const std::string& path, const Header& header) {
  const auto found = header.metadata.find("vocabulary");
  if (found == header.metadata.end()) return 0u;
  const std::string& text = found->second;
  uint32_t vocabulary = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), vocabulary);
  if (error != std::errc() || end != text.data() + text.size() || vocabulary == 0 ||
      vocabulary > kVocabularyMax) {
    return corrupt(path,
                   fmt::format("the token file's header: vocabulary is no number from 1 to {}",
                               kVocabularyMax));
  }
  return vocabulary;
}

Result<TokenFile> read_safetensors(std::shared_ptr<const DataFile> file) {
  const std::string& path = file->path();
  SI_ASSIGN_OR_RETURN(const Header header, Header::read(*file));
  SI_RETURN_IF_ERROR(check_tensors(*file, header));
  const auto version = header.metadata.find("token_file");
  if (version != header.metadata.end() && version->second != kVersion) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("the token file is of version \"{}\", and this program reads \"{}\"",
                    base::printable(version->second) ? version->second.substr(0, 20) : "?",
                    kVersion),
        "Make it anew with the scripts/make_token_files.py of this version",
        base::ErrorPlace{path, {}, {}, 0});
  }
  const auto of_type = [](const Tensor& tensor, std::initializer_list<std::string_view> types) {
    return std::ranges::find(types, tensor.type) != types.end();
  };
  const auto found = header.tensors.find("tokens");
  if (found == header.tensors.end()) {
    return corrupt(path, "not a token file: it has no tensor \"tokens\"");
  }
  const Tensor& tokens = found->second;
  if (!of_type(tokens, {"U8", "U16", "U32"})) {
    return corrupt(path, fmt::format("tokens are {}; they must be U8, U16 or U32", tokens.type));
  }
  TokenFile out;
  SI_ASSIGN_OR_RETURN(out.vocabulary, parse_vocabulary(path, header));
  const uint64_t count = tokens.shape[0];
  const uint32_t token_bytes = tokens.type == "U8" ? 1 : tokens.type == "U16" ? 2 : 4;
  out.tokens = {nullptr, file, tokens.offset, count, token_bytes, path};
  if (const auto mask = header.tensors.find("loss_mask"); mask != header.tensors.end()) {
    if (!of_type(mask->second, {"U8", "BOOL"})) {
      return corrupt(path,
                     fmt::format("loss_mask is {}; it must be U8 or BOOL", mask->second.type));
    }
    if (mask->second.shape[0] != count) {
      return corrupt(path, fmt::format("loss_mask has {} elements, but there are {} tokens",
                                       mask->second.shape[0], count));
    }
    out.tokens.mask_offset = mask->second.offset;
  }
  if (const auto starts = header.tensors.find("document_starts"); starts != header.tensors.end()) {
    if (!of_type(starts->second, {"U64", "I64"})) {
      return corrupt(path, fmt::format("document_starts are {}; they must be U64 or I64",
                                       starts->second.type));
    }
    if (starts->second.shape[0] == 0) return corrupt(path, "document_starts names no document");
    SI_ASSIGN_OR_RETURN(out.document_starts, read_starts(*file, starts->second, count));
  }
  return out;
}

}  // namespace

bool is_token_file(const std::string& path) {
  return path.ends_with(".bin") || path.ends_with(".safetensors");
}

Result<TokenFile> read_token_file(const std::string& path) {
  SI_ASSIGN_OR_RETURN(DataFile opened, DataFile::open(path));
  auto file = std::make_shared<const DataFile>(std::move(opened));
  return path.ends_with(".bin") ? read_bin(std::move(file)) : read_safetensors(std::move(file));
}

}  // namespace smartinf::train
