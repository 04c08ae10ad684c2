// The tokens of training and validation: text files and folders as bytes, or ready token files.
// Decides what is training and what is validation; says nothing about order
// (window_order.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/data_file.h"
#include "smartinf/base/status.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// Bytes are tokens as they are. 0xff never occurs in UTF-8, so it is free to stand between files.
inline constexpr uint32_t kByteVocabulary = 256;
inline constexpr uint32_t kByteSeparator = 255;

/// A run of tokens, one after another, in memory or in a file.
struct TokenSegment {
  const std::byte* data = nullptr;  // null: in a file...
  std::shared_ptr<const base::DataFile> file;
  uint64_t offset = 0;  // ...from this byte on
  uint64_t count = 0;
  uint32_t token_bytes = 1;  // 1, 2 or 4, little-endian
  std::string path;          // for messages
};

class TokenStream {
 public:
  void add(TokenSegment segment);
  uint64_t count() const { return count_; }
  /// Tokens [first, first + out.size()). Errors: kCorrupt for a token not below `vocabulary`, with
  /// its file and position, and for a file that has become shorter; kIo. first + out.size() <=
  /// count().
  base::Status read(uint64_t first, uint64_t vocabulary, std::span<int64_t> out) const;

 private:
  std::vector<TokenSegment> segments_;
  std::vector<uint64_t> ends_;  // of each segment, in tokens of the stream
  uint64_t count_ = 0;
};

/// Immutable once open. Text is held in memory, token files are read window by window.
/// Held out for validation: data.validation_paths if given. Else, of a corpus with many files,
/// whole files chosen by a hash of their names; of one with few, the last share of each.
class Corpus {
 public:
  /// Errors: kNotFound (path named), kInvalidArgument (empty, shorter than a sequence, text and
  /// token files mixed), kCorrupt (token file whose header and size disagree).
  static base::Result<Corpus> open(const DataOptions& options);

  const TokenStream& training() const { return training_; }
  const TokenStream& validation() const { return validation_; }
  /// Smallest vocabulary that holds the tokens; 0: token files do not say.
  uint32_t vocabulary() const { return vocabulary_; }
  bool bytes() const { return vocabulary_ == kByteVocabulary; }
  /// Of names, sizes and contents (of token files: their first and last MiB).
  uint64_t digest() const { return digest_; }
  /// "1432 files, 27.1 MB for training, 0.6 MB for validation".
  std::string describe() const;

 private:
  base::Status add_text(const DataOptions& options);
  base::Status add_token_files(const DataOptions& options);
  base::Status check_lengths(const DataOptions& options) const;

  TokenStream training_;
  TokenStream validation_;
  std::vector<std::vector<std::byte>> texts_;
  uint32_t vocabulary_ = 0;
  uint64_t digest_ = 0;
  uint64_t files_ = 0;
};

/// The folder of the standard library's sources of the python3 on PATH.
base::Result<std::string> python_stdlib_folder();

}  // namespace smartinf::train
