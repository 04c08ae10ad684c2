// The tokens of training, validation and evaluation: text files and folders as bytes, or ready
// token files. Decides what belongs to which; says nothing about order (window_order.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/train/options.h"
#include "smartinf/train/windows.h"

namespace smartinf::train {

/// Bytes are tokens as they are. 0xff never occurs in UTF-8, so it is free to stand between files.
inline constexpr uint32_t kByteVocabulary = 256;
inline constexpr uint32_t kByteSeparator = 255;

/// Immutable once open. Text is held in memory, token files are read window by window.
/// Held out for validation: data.validation_paths if given. Else, of a corpus with many files (or
/// token files with many documents), whole ones chosen by a hash of their names or numbers; of one
/// with few, the last share of each.
class Corpus {
 public:
  /// Errors: kNotFound (path named), kInvalidArgument (empty, shorter than a sequence, text and
  /// token files mixed), kCorrupt (of token files).
  static base::Result<Corpus> open(const DataOptions& options);

  const Windows& training() const { return training_; }
  const Windows& validation() const { return validation_; }
  /// data.evaluation, in the order of the names' first mention.
  struct NamedWindows {
    std::string name;
    Windows windows;
  };
  const std::vector<NamedWindows>& evaluation() const { return evaluation_; }
  /// Smallest vocabulary that holds the tokens; 0: token files do not say.
  uint32_t vocabulary() const { return vocabulary_; }
  bool bytes() const { return bytes_; }
  /// Digest of names, sizes and contents (of token files: their first and last MiB, and the borders
  /// of documents). Data that is only evaluated is not in it.
  uint64_t digest() const { return digest_; }
  /// "27.1 million bytes for training, 610233 for validation, of 1432 files".
  std::string describe() const;

 private:
  /// Windows of several files together: for training, and held out of it.
  struct Parts {
    Windows training;
    Windows held_out;
  };
  base::Status add_text(const DataOptions& options);
  base::Status add_token_files(const DataOptions& options);
  base::Result<Windows> evaluation_text(const DataOptions& options, const EvaluationSet& set);
  base::Result<Windows> evaluation_tokens(const DataOptions& options, const EvaluationSet& set);
  base::Result<Parts> read_token_files(std::string_view key, const std::vector<std::string>& paths,
                                       uint32_t sequence, double held_share, uint64_t& digest);
  /// The stream of a text, held in memory.
  Windows keep_text(std::vector<std::byte> text, uint32_t sequence);

  Windows training_;
  Windows validation_;
  std::vector<NamedWindows> evaluation_;
  std::vector<std::vector<std::byte>> texts_;
  uint32_t vocabulary_ = 0;
  bool bytes_ = false;
  uint64_t digest_ = 0;
  uint64_t files_ = 0;
};

/// The folder of the standard library's sources of the python3 on PATH.
base::Result<std::string> python_stdlib_folder();

}  // namespace smartinf::train
