#include "smartinf/train/corpus.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"

namespace smartinf::train {
namespace {

namespace fs = std::filesystem;
using base::ErrorCode;
using base::Result;
using base::Status;

// llm.c's token files: 256 little-endian int32 (magic, version, token count, zeros), then the
// tokens.
constexpr uint64_t kTokenHeaderBytes = 256 * 4;
struct TokenFileKind {
  int32_t magic;
  int32_t version;
  uint32_t token_bytes;
};
constexpr TokenFileKind kTokenFileKinds[] = {{20240520, 1, 2}, {20240801, 7, 4}};

// With fewer files than this the split by whole files would be a matter of luck.
constexpr size_t kSplitByFileMin = 16;
constexpr uint64_t kDigestSampleBytes = base::kMiB;

base::ErrorPlace at_path(const std::string& path) {
  base::ErrorPlace place;
  place.path = path;
  return place;
}

uint64_t digest_bytes(uint64_t digest, std::span<const std::byte> bytes) {
  return base::mix_seed(digest, base::checksum(bytes));
}

uint64_t digest_text(uint64_t digest, std::string_view text) {
  return digest_bytes(digest, std::as_bytes(std::span(text)));
}

bool is_token_file(const std::string& path) { return path.ends_with(".bin"); }

// Installed packages differ from machine to machine and caches hold no text.
bool skipped_folder(const std::string& name) {
  return name == "site-packages" || name == "dist-packages" || name == "__pycache__" ||
         name.starts_with(".");
}

struct TextFile {
  std::string path;
  std::string name;  // relative to what the user named, so that it is the same on every machine
};

// All files below a folder, in the order of their names' bytes.
Result<std::vector<TextFile>> list_folder(const std::string& folder,
                                          const std::vector<std::string>& suffixes) {
  std::vector<TextFile> files;
  std::error_code error;
  auto entry = fs::recursive_directory_iterator(folder, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (entry->is_directory(error) && skipped_folder(name)) {
      entry.disable_recursion_pending();
      continue;
    }
    if (!entry->is_regular_file(error) || name.starts_with(".")) continue;
    const bool wanted =
        suffixes.empty() || std::any_of(suffixes.begin(), suffixes.end(),
                                        [&](const auto& suffix) { return name.ends_with(suffix); });
    if (wanted) {
      files.push_back({entry->path().string(), entry->path().lexically_relative(folder).string()});
    }
  }
  if (error) return base::errno_status(error.value(), "data.paths: cannot list the folder", folder);
  std::sort(files.begin(), files.end(),
            [](const TextFile& a, const TextFile& b) { return a.name < b.name; });
  return files;
}

Result<std::vector<TextFile>> list_text(std::string_view key, const std::vector<std::string>& paths,
                                        const std::vector<std::string>& suffixes) {
  std::vector<TextFile> files;
  for (const std::string& given : paths) {
    std::string path = given;
    std::vector<std::string> wanted = suffixes;
    if (given == kPythonStdlib) {
      SI_ASSIGN_OR_RETURN(path, python_stdlib_folder());
      if (wanted.empty()) wanted = {".py"};
    }
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (!fs::exists(status)) {
      return Status(ErrorCode::kNotFound, fmt::format("{}: no such file or folder", key),
                    "Check the path; it is relative to the working directory", at_path(path));
    }
    if (fs::is_directory(status)) {
      SI_ASSIGN_OR_RETURN(std::vector<TextFile> found, list_folder(path, wanted));
      files.insert(files.end(), found.begin(), found.end());
    } else {
      files.push_back({path, fs::path(path).filename().string()});
    }
  }
  return files;
}

// Appends a file and a separator. Binary files (a zero byte near the start) are left out: false.
Result<bool> append_text(const TextFile& file, std::vector<std::byte>& text) {
  SI_ASSIGN_OR_RETURN(const base::DataFile in, base::DataFile::open(file.path));
  const size_t size = in.size();
  const size_t start = text.size();
  text.resize(start + size + 1);
  SI_RETURN_IF_ERROR(in.read(0, std::span(text).subspan(start, size)));
  const bool binary =
      size == 0 || std::memchr(text.data() + start, 0, std::min<size_t>(size, 8192)) != nullptr;
  if (binary) {
    text.resize(start);
    return false;
  }
  text.back() = std::byte{kByteSeparator};
  return true;
}

Result<TokenSegment> parse_token_file(std::shared_ptr<const base::DataFile> file) {
  const std::string& path = file->path();
  const auto corrupt = [&](std::string what) {
    return Status(ErrorCode::kCorrupt, std::move(what),
                  "Make token files with scripts/tokenize_text.py or llm.c's data scripts",
                  at_path(path));
  };
  int32_t header[3] = {};
  if (file->size() < kTokenHeaderBytes) return corrupt("the token file is shorter than its header");
  SI_RETURN_IF_ERROR(file->read(0, std::as_writable_bytes(std::span(header))));
  for (const TokenFileKind& kind : kTokenFileKinds) {
    if (header[0] != kind.magic || header[1] != kind.version) continue;
    const uint64_t held = (file->size() - kTokenHeaderBytes) / kind.token_bytes;
    if (header[2] < 0 || static_cast<uint64_t>(header[2]) != held) {
      return corrupt(fmt::format("the token file's header says {} tokens, but its size says {}",
                                 header[2], held));
    }
    return TokenSegment{nullptr, std::move(file), kTokenHeaderBytes, held, kind.token_bytes, path};
  }
  return corrupt(fmt::format("not a token file: magic {} version {}", header[0], header[1]));
}

}  // namespace

void TokenStream::add(TokenSegment segment) {
  if (segment.count == 0) return;
  count_ += segment.count;
  segments_.push_back(std::move(segment));
  ends_.push_back(count_);
}

Status TokenStream::read(uint64_t first, uint64_t vocabulary, std::span<int64_t> out) const {
  SI_CHECK(first + out.size() <= count_, "tokens beyond the end of the stream");
  size_t index =
      static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
  for (size_t done = 0; done < out.size(); ++index) {
    const TokenSegment& segment = segments_[index];
    uint64_t at = first + done - (ends_[index] - segment.count);
    const uint64_t bytes = std::min(segment.count - at, out.size() - done) * segment.token_bytes;
    std::vector<std::byte> read;
    const std::byte* token = segment.data + at * segment.token_bytes;
    if (segment.file != nullptr) {
      read.resize(bytes);
      SI_RETURN_IF_ERROR(segment.file->read(segment.offset + at * segment.token_bytes, read));
      token = read.data();
    }
    for (const std::byte* end = token + bytes; token != end;
         token += segment.token_bytes, ++at, ++done) {
      uint32_t value = 0;
      std::memcpy(&value, token, segment.token_bytes);
      if (value >= vocabulary) {
        return Status(ErrorCode::kCorrupt,
                      fmt::format("token {} at position {} is not below model.vocabulary ({})",
                                  value, at, vocabulary),
                      "Set model.vocabulary to the tokenizer's size", at_path(segment.path));
      }
      out[done] = value;
    }
  }
  return Status();
}

Result<std::string> python_stdlib_folder() {
  const char* command = "python3 -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"))'";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command, "r"), &::pclose);
  std::string folder;
  if (pipe != nullptr) {
    char line[4096] = {};
    if (std::fgets(line, sizeof line, pipe.get()) != nullptr) folder = line;
    while (folder.ends_with('\n')) folder.pop_back();
  }
  if (folder.empty() || !fs::is_directory(folder)) {
    return Status(
        ErrorCode::kNotFound,
        fmt::format("data.paths: \"{}\" needs python3, which was not found", kPythonStdlib),
        "Install python3 (Debian: apt-get install python3), or name other text files");
  }
  return folder;
}

Result<Corpus> Corpus::open(const DataOptions& options) {
  if (std::error_code error; !options.tokenizer.empty() && !fs::exists(options.tokenizer, error)) {
    return Status(
        ErrorCode::kNotFound, "data.tokenizer: no such file",
        "Name the tokenizer.json of the token files, which export needs, or leave the key out",
        at_path(options.tokenizer));
  }
  Corpus corpus;
  const auto token_files = std::count_if(options.paths.begin(), options.paths.end(), is_token_file);
  if (token_files == 0) {
    SI_RETURN_IF_ERROR(corpus.add_text(options));
  } else if (static_cast<size_t>(token_files) == options.paths.size()) {
    SI_RETURN_IF_ERROR(corpus.add_token_files(options));
  } else {
    return Status(ErrorCode::kInvalidArgument, "data.paths mixes text and token files (.bin)",
                  "Make token files of the text with scripts/tokenize_text.py first");
  }
  SI_RETURN_IF_ERROR(corpus.check_lengths(options));
  // Another data.validation_share moves the windows, although the text is the same.
  corpus.digest_ = base::mix_seed(corpus.digest_, corpus.training_.count());
  return corpus;
}

Status Corpus::add_text(const DataOptions& options) {
  if (!options.tokenizer.empty()) {
    return Status(ErrorCode::kInvalidArgument,
                  "data.tokenizer is given, but data.paths names text, which is read as bytes",
                  "Make token files of the text with scripts/tokenize_text.py and name those, or "
                  "leave data.tokenizer out");
  }
  SI_ASSIGN_OR_RETURN(std::vector<TextFile> files,
                      list_text("data.paths", options.paths, options.suffixes));
  const bool own_validation = !options.validation_paths.empty();
  const bool by_file = !own_validation && files.size() >= kSplitByFileMin;
  std::vector<std::byte> training;
  std::vector<std::byte> validation;
  for (const TextFile& file : files) {
    // The split must not move when files come or go, so it looks at the name alone.
    const uint64_t drawn = base::checksum(std::as_bytes(std::span(file.name)));
    const bool held_out =
        by_file && static_cast<double>(drawn >> 11) * 0x1p-53 < options.validation_share;
    std::vector<std::byte>& text = held_out ? validation : training;
    const size_t start = text.size();
    SI_ASSIGN_OR_RETURN(const bool taken, append_text(file, text));
    if (!taken) continue;
    ++files_;
    digest_ = digest_bytes(digest_text(digest_, file.name), std::span(text).subspan(start));
    if (!by_file && !own_validation) {
      const auto held =
          static_cast<size_t>(static_cast<double>(text.size() - start) * options.validation_share);
      validation.insert(validation.end(), text.end() - static_cast<std::ptrdiff_t>(held),
                        text.end());
      text.resize(text.size() - held);
    }
  }
  if (own_validation) {
    SI_ASSIGN_OR_RETURN(
        files, list_text("data.validation_paths", options.validation_paths, options.suffixes));
    for (const TextFile& file : files) {
      SI_ASSIGN_OR_RETURN([[maybe_unused]] const bool taken, append_text(file, validation));
    }
    digest_ = digest_bytes(digest_, validation);
  }
  vocabulary_ = kByteVocabulary;
  for (auto [text, stream] : {std::pair{&training, &training_}, {&validation, &validation_}}) {
    texts_.push_back(std::move(*text));
    stream->add({texts_.back().data(), nullptr, 0, texts_.back().size(), 1, "the corpus"});
  }
  return Status();
}

Status Corpus::add_token_files(const DataOptions& options) {
  const bool own_validation = !options.validation_paths.empty();
  const auto add = [&](const std::string& path, bool for_validation) -> Status {
    SI_ASSIGN_OR_RETURN(base::DataFile opened, base::DataFile::open(path));
    const auto file = std::make_shared<const base::DataFile>(std::move(opened));
    SI_ASSIGN_OR_RETURN(TokenSegment segment, parse_token_file(file));
    std::vector<std::byte> sample(std::min<uint64_t>(file->size(), kDigestSampleBytes));
    digest_ = base::mix_seed(digest_, file->size());
    for (const uint64_t offset : {uint64_t{0}, file->size() - sample.size()}) {
      SI_RETURN_IF_ERROR(file->read(offset, sample));
      digest_ = digest_bytes(digest_, sample);
    }
    if (for_validation) {
      validation_.add(segment);
    } else {
      TokenSegment held = segment;
      held.count = own_validation ? 0
                                  : static_cast<uint64_t>(static_cast<double>(segment.count) *
                                                          options.validation_share);
      segment.count -= held.count;
      held.offset += segment.count * segment.token_bytes;
      training_.add(segment);
      validation_.add(held);
    }
    ++files_;
    return Status();
  };
  for (const std::string& path : options.paths) SI_RETURN_IF_ERROR(add(path, false));
  for (const std::string& path : options.validation_paths) SI_RETURN_IF_ERROR(add(path, true));
  return Status();
}

// A window is a sequence and the token after it.
Status Corpus::check_lengths(const DataOptions& options) const {
  const uint64_t window = uint64_t{options.sequence} + 1;
  if (files_ == 0 || training_.count() == 0) {
    return Status(ErrorCode::kInvalidArgument, "data.paths: there is no text",
                  options.suffixes.empty() ? "Name files with text in them"
                                           : "Name files with text in them, or check data.suffixes",
                  at_path(options.paths.front()));
  }
  if (training_.count() < window) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "data.paths: the {} tokens for training are fewer than data.sequence ({}) plus one",
            training_.count(), options.sequence),
        "Choose a shorter data.sequence or more text", at_path(options.paths.front()));
  }
  const bool wanted = options.validation_share > 0 || !options.validation_paths.empty();
  if (wanted && validation_.count() < window) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("data.validation_share: the {} tokens held out are fewer than data.sequence "
                    "({}) plus one",
                    validation_.count(), options.sequence),
        "Choose a larger data.validation_share (0 for no validation) or a shorter data.sequence");
  }
  return Status();
}

std::string Corpus::describe() const {
  const char* unit = bytes() ? "bytes" : "tokens";
  return fmt::format("{} {}, {:.1f} million {} for training, {:.2f} million for validation", files_,
                     files_ == 1 ? "file" : "files", static_cast<double>(training_.count()) * 1e-6,
                     unit, static_cast<double>(validation_.count()) * 1e-6);
}

}  // namespace smartinf::train
