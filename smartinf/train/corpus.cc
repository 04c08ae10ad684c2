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
#include "smartinf/train/random.h"
#include "smartinf/train/token_file.h"

namespace smartinf::train {
namespace {

namespace fs = std::filesystem;
using base::ErrorCode;
using base::Result;
using base::Status;

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

Result<std::vector<std::byte>> read_text(std::string_view key,
                                         const std::vector<std::string>& paths,
                                         const std::vector<std::string>& suffixes) {
  SI_ASSIGN_OR_RETURN(const std::vector<TextFile> files, list_text(key, paths, suffixes));
  std::vector<std::byte> text;
  for (const TextFile& file : files) {
    SI_ASSIGN_OR_RETURN([[maybe_unused]] const bool taken, append_text(file, text));
  }
  return text;
}

Status digest_token_file(const TokenFile& token_file, uint64_t& digest) {
  const base::DataFile& file = *token_file.tokens.file;
  std::vector<std::byte> sample(std::min<uint64_t>(file.size(), kDigestSampleBytes));
  digest = base::mix_seed(digest, file.size());
  for (const uint64_t offset : {uint64_t{0}, file.size() - sample.size()}) {
    SI_RETURN_IF_ERROR(file.read(offset, sample));
    digest = digest_bytes(digest, sample);
  }
  if (!token_file.document_starts.empty()) {
    digest = digest_bytes(digest, std::as_bytes(std::span(token_file.document_starts)));
  }
  return Status();
}

Status check_kinds(const DataOptions& options, const std::vector<EvaluationSet>& sets,
                   bool token_files) {
  const auto check = [&](std::string_view key, const std::vector<std::string>& paths) -> Status {
    const auto there = std::count_if(paths.begin(), paths.end(), is_token_file);
    if (static_cast<size_t>(there) == (token_files ? paths.size() : 0)) return Status();
    return Status(ErrorCode::kInvalidArgument,
                  key == "data.paths" ? "data.paths mixes text and token files (.bin, .safetensors)"
                                      : fmt::format("{} names {}, but data.paths names {}", key,
                                                    token_files ? "text" : "token files",
                                                    token_files ? "token files" : "text"),
                  "Make token files of the text with scripts/make_token_files.py first");
  };
  SI_RETURN_IF_ERROR(check("data.paths", options.paths));
  SI_RETURN_IF_ERROR(check("data.validation_paths", options.validation_paths));
  for (const EvaluationSet& set : sets) SI_RETURN_IF_ERROR(check("data.evaluation", set.paths));
  return Status();
}

// A window is a sequence and the token after it.
Status check_training(const DataOptions& options, const Windows& windows) {
  if (windows.count() > 0) return Status();
  const auto wrong = [&](std::string what, const char* advice) {
    return Status(ErrorCode::kInvalidArgument, std::move(what), advice,
                  at_path(options.paths.front()));
  };
  if (windows.stream().count() == 0) {
    return wrong("data.paths: there is no text",
                 options.suffixes.empty() ? "Name files with text in them"
                                          : "Name files with text in them, or check data.suffixes");
  }
  if (windows.has_documents()) {
    return wrong("data.paths: no token of the documents for training counts as a target",
                 "A target is a token that its document has another one before and that loss_mask "
                 "counts (docs/data.md)");
  }
  return wrong(
      fmt::format("data.paths: the {} tokens for training are fewer than data.sequence ({}) plus "
                  "one",
                  windows.stream().count(), options.sequence),
      "Choose a shorter data.sequence or more text");
}

Status check_validation(const DataOptions& options, const Windows& windows) {
  const bool wanted = options.validation_share > 0 || !options.validation_paths.empty();
  if (!wanted || windows.count() > 0) return Status();
  return Status(
      ErrorCode::kInvalidArgument,
      windows.has_documents()
          ? "data.validation_share: no token of the documents held out counts as a target"
          : fmt::format("data.validation_share: the {} tokens held out are fewer than "
                        "data.sequence ({}) plus one",
                        windows.stream().count(), options.sequence),
      "Choose a larger data.validation_share (0 for no validation) or a shorter data.sequence");
}

struct Split {
  std::vector<Document> training;
  std::vector<Document> held_out;
};

// Each document by a number drawn for its place in its file, so that the split does not move when
// files come or go. At least one is held out, where there are two.
void split_documents(const std::vector<uint64_t>& starts, uint64_t first, uint64_t tokens,
                     double share, Split& split) {
  constexpr uint64_t kSplitSeed = 26;
  for (size_t i = 0; i < starts.size(); ++i) {
    const uint64_t end = i + 1 < starts.size() ? starts[i + 1] : tokens;
    const bool held_out = random_uniform(kSplitSeed, i) < share;
    (held_out ? split.held_out : split.training).push_back({first + starts[i], end - starts[i]});
  }
}

}  // namespace

Result<Corpus> Corpus::open(const DataOptions& options) {
  if (std::error_code error; !options.tokenizer.empty() && !fs::exists(options.tokenizer, error)) {
    return Status(
        ErrorCode::kNotFound, "data.tokenizer: no such file",
        "Name the tokenizer.json of the token files, which export needs, or leave the key out",
        at_path(options.tokenizer));
  }
  SI_ASSIGN_OR_RETURN(const std::vector<EvaluationSet> sets, evaluation_sets(options));
  Corpus corpus;
  const bool token_files = std::ranges::any_of(options.paths, is_token_file);
  SI_RETURN_IF_ERROR(check_kinds(options, sets, token_files));
  SI_RETURN_IF_ERROR(token_files ? corpus.add_token_files(options) : corpus.add_text(options));
  SI_RETURN_IF_ERROR(check_training(options, corpus.training_));
  SI_RETURN_IF_ERROR(check_validation(options, corpus.validation_));
  for (const EvaluationSet& set : sets) {
    SI_ASSIGN_OR_RETURN(Windows windows, token_files ? corpus.evaluation_tokens(options, set)
                                                     : corpus.evaluation_text(options, set));
    if (windows.count() == 0) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("data.evaluation: \"{}\" has no sequence with a target", set.name),
                    "Name more text, or choose a shorter data.sequence",
                    at_path(set.paths.front()));
    }
    corpus.evaluation_.push_back({set.name, std::move(windows)});
  }
  // Another data.validation_share moves the windows, although the text is the same.
  const Windows& training = corpus.training_;
  corpus.digest_ = base::mix_seed(
      corpus.digest_, training.has_documents() ? training.tokens() : training.stream().count());
  return corpus;
}

Windows Corpus::keep_text(std::vector<std::byte> text, uint32_t sequence) {
  texts_.push_back(std::move(text));
  auto stream = std::make_shared<TokenStream>();
  stream->add({texts_.back().data(), nullptr, 0, texts_.back().size(), 1, "the corpus"});
  return Windows(std::move(stream), sequence);
}

Status Corpus::add_text(const DataOptions& options) {
  if (!options.tokenizer.empty()) {
    return Status(ErrorCode::kInvalidArgument,
                  "data.tokenizer is given, but data.paths names text, which is read as bytes",
                  "Make token files of the text with scripts/make_token_files.py and name those, "
                  "or leave data.tokenizer out");
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
        validation, read_text("data.validation_paths", options.validation_paths, options.suffixes));
    digest_ = digest_bytes(digest_, validation);
  }
  vocabulary_ = kByteVocabulary;
  bytes_ = true;
  training_ = keep_text(std::move(training), options.sequence);
  validation_ = keep_text(std::move(validation), options.sequence);
  return Status();
}

Result<Windows> Corpus::evaluation_text(const DataOptions& options, const EvaluationSet& set) {
  SI_ASSIGN_OR_RETURN(std::vector<std::byte> text,
                      read_text("data.evaluation", set.paths, options.suffixes));
  return keep_text(std::move(text), options.sequence);
}

Status Corpus::add_token_files(const DataOptions& options) {
  const bool own_validation = !options.validation_paths.empty();
  SI_ASSIGN_OR_RETURN(Parts parts,
                      read_token_files("data.paths", options.paths, options.sequence,
                                       own_validation ? 0 : options.validation_share, digest_));
  training_ = std::move(parts.training);
  validation_ = std::move(parts.held_out);
  files_ = options.paths.size() + options.validation_paths.size();
  if (!own_validation) return Status();
  SI_ASSIGN_OR_RETURN(parts, read_token_files("data.validation_paths", options.validation_paths,
                                              options.sequence, 0, digest_));
  validation_ = std::move(parts.training);
  return Status();
}

Result<Windows> Corpus::evaluation_tokens(const DataOptions& options, const EvaluationSet& set) {
  uint64_t digest = 0;
  SI_ASSIGN_OR_RETURN(Parts parts,
                      read_token_files("data.evaluation", set.paths, options.sequence, 0, digest));
  return std::move(parts.training);
}

Result<Corpus::Parts> Corpus::read_token_files(std::string_view key,
                                               const std::vector<std::string>& paths,
                                               uint32_t sequence, double held_share,
                                               uint64_t& digest) {
  auto stream = std::make_shared<TokenStream>();
  auto held = std::make_shared<TokenStream>();
  Split split;
  bool with_documents = false;
  for (const std::string& path : paths) {
    SI_ASSIGN_OR_RETURN(const TokenFile file, read_token_file(path));
    SI_RETURN_IF_ERROR(digest_token_file(file, digest));
    vocabulary_ = std::max(vocabulary_, file.vocabulary);
    const std::vector<uint64_t>& starts = file.document_starts;
    if (path == paths.front()) with_documents = !starts.empty();
    if (with_documents == starts.empty()) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("{} mixes token files with documents and without", key),
                    "Make all of them of one kind with scripts/make_token_files.py", at_path(path));
    }
    TokenSegment segment = file.tokens;
    if (with_documents) {
      split_documents(starts, stream->count(), segment.count, held_share, split);
    } else {
      TokenSegment last = segment;
      last.count = static_cast<uint64_t>(static_cast<double>(segment.count) * held_share);
      segment.count -= last.count;
      last.offset += segment.count * segment.token_bytes;
      if (last.mask_offset != 0) last.mask_offset += segment.count;
      held->add(std::move(last));
    }
    stream->add(std::move(segment));
  }
  if (!with_documents) return Parts{Windows(stream, sequence), Windows(held, sequence)};
  if (held_share > 0 && split.held_out.empty() && split.training.size() > 1) {
    split.held_out.push_back(split.training.back());
    split.training.pop_back();
  }
  Parts parts;
  SI_ASSIGN_OR_RETURN(parts.training, Windows::of_documents(stream, split.training, sequence));
  SI_ASSIGN_OR_RETURN(parts.held_out, Windows::of_documents(stream, split.held_out, sequence));
  return parts;
}

std::string Corpus::describe() const {
  const auto amount = [](const Windows& windows) {
    const uint64_t count = windows.has_documents() ? windows.tokens() : windows.stream().count();
    return count < 1'000'000 ? std::to_string(count)
                             : fmt::format("{:.1f} million", static_cast<double>(count) * 1e-6);
  };
  std::string text = fmt::format("{} {} for training, {} for validation, of {} {}",
                                 amount(training_), bytes() ? "bytes" : "tokens",
                                 amount(validation_), files_, files_ == 1 ? "file" : "files");
  if (training_.has_documents()) text += "; " + training_.describe_packing();
  return text;
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

}  // namespace smartinf::train
