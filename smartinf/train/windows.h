// Rows that training and validation read: each of a fixed number of tokens, each with its target,
// the token after it. A stream of tokens is cut at every so many; documents are packed whole.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/train/token_stream.h"

namespace smartinf::train {

/// The target of a token that counts for nothing: torch's ignore_index.
inline constexpr int64_t kNoTarget = -100;

/// A range of a stream's tokens.
struct Document {
  uint64_t first = 0;
  uint64_t count = 0;
};

/// Threads: reading is const. Memory: some 16 bytes for each piece of a document.
class Windows {
 public:
  Windows() = default;
  /// Window w has the tokens [w T, w T + T) of the stream, T = sequence.
  Windows(std::shared_ptr<const TokenStream> stream, uint32_t sequence);
  /// Windows of whole documents, none of which is in two windows, unless it is longer than a
  /// sequence and the token after it: that one is cut into pieces of a sequence each. A piece that
  /// has no target that counts is left out. Follows from its arguments alone, not from the order
  /// in which windows are seen. Reads the mask, if there is one. Errors: of
  /// TokenStream::read_mask().
  static base::Result<Windows> of_documents(std::shared_ptr<const TokenStream> stream,
                                            std::span<const Document> documents, uint32_t sequence);

  uint64_t count() const { return count_; }
  const TokenStream& stream() const { return *stream_; }
  bool has_documents() const { return has_documents_; }
  /// Counts of documents: tokens that are read, and targets that count, in all windows.
  uint64_t tokens() const { return tokens_; }
  uint64_t targets() const { return targets_; }
  /// Tokens of documents' pieces that were left out.
  uint64_t left_out() const { return left_out_; }

  /// Text about documents: "90 documents or pieces of them in 12 windows, 97.1 % full".
  std::string describe_packing() const;

  /// Rows of a batch: tokens and targets are `sequence` for each of `windows`, row by row. A target
  /// that does not count is kNoTarget; what documents leave free at the end of a row is token 0
  /// without targets. document_ends: where documents end in all rows together, ascending; each
  /// row's end is one. Empty where the stream has no documents. Errors: of TokenStream. Each
  /// window is below count().
  base::Status read(std::span<const uint64_t> windows, uint64_t vocabulary,
                    std::span<int64_t> tokens, std::span<int64_t> targets,
                    std::vector<int64_t>& document_ends) const;

 private:
  struct Piece {
    uint64_t first = 0;   // token of the stream
    uint32_t tokens = 0;  // that are read; the last one's target is behind them
  };
  base::Status cut(const Document& document);
  base::Status read_documents(uint64_t window, uint64_t vocabulary, std::span<int64_t> tokens,
                              std::span<int64_t> targets, std::vector<int64_t>& ends) const;
  base::Status read_piece(const Piece& piece, uint64_t vocabulary, std::span<int64_t> tokens,
                          std::span<int64_t> targets) const;

  std::shared_ptr<const TokenStream> stream_ = std::make_shared<const TokenStream>();
  uint32_t sequence_ = 1;
  uint64_t count_ = 0;
  bool has_documents_ = false;
  std::vector<Piece> pieces_;   // of documents, window by window
  std::vector<uint64_t> ends_;  // of each window, in pieces
  uint64_t tokens_ = 0;
  uint64_t targets_ = 0;
  uint64_t left_out_ = 0;
};

}  // namespace smartinf::train
