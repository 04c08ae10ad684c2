// Tokens of one or several files, one after another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/data_file.h"
#include "smartinf/base/status.h"

namespace smartinf::train {

/// A run of tokens, one after another, in memory or in a file.
struct TokenSegment {
  const std::byte* data = nullptr;  // null: in a file...
  std::shared_ptr<const base::DataFile> file;
  uint64_t offset = 0;  // ...from this byte on
  uint64_t count = 0;
  uint32_t token_bytes = 1;  // 1, 2 or 4, little-endian
  std::string path;          // for messages
  /// Where in the file each token has a byte, 1: it counts as a target, 0: it does not. 0: without
  /// a mask; all count.
  uint64_t mask_offset = 0;
};

/// Threads: reading is const.
class TokenStream {
 public:
  void add(TokenSegment segment);
  uint64_t count() const { return count_; }
  /// Whether a token may be no target.
  bool masked() const { return masked_; }
  /// Tokens [first, first + out.size()). Errors: kCorrupt for a token not below `vocabulary`, with
  /// its file and position, and for a file that has become shorter; kIo. first + out.size() <=
  /// count().
  base::Status read(uint64_t first, uint64_t vocabulary, std::span<int64_t> out) const;
  /// For the same range: 1 for a token that counts as a target, else 0. Errors: kCorrupt for
  /// another value, with its file and position, and for a file that has become shorter; kIo.
  base::Status read_mask(uint64_t first, std::span<uint8_t> out) const;

 private:
  /// A part of one segment: `count` tokens from its token `at` on.
  struct Part {
    const TokenSegment& segment;
    uint64_t at;
    uint64_t count;
  };
  Part part_at(uint64_t first, uint64_t count_max) const;

  std::vector<TokenSegment> segments_;
  std::vector<uint64_t> ends_;  // of each segment, in tokens of the stream
  uint64_t count_ = 0;
  bool masked_ = false;
};

}  // namespace smartinf::train
