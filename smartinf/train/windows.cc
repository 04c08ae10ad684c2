#include "smartinf/train/windows.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/train/packing.h"

namespace smartinf::train {

using base::Result;
using base::Status;

Windows::Windows(std::shared_ptr<const TokenStream> stream, uint32_t sequence)
    : stream_(std::move(stream)), sequence_(sequence) {
  if (stream_->count() > 0) count_ = (stream_->count() - 1) / sequence_;
}

// A document of n tokens has n - 1 that are read and have a target.
Status Windows::cut(const Document& document) {
  std::vector<uint8_t> mask;
  for (uint64_t at = 0; at + 1 < document.count; at += sequence_) {
    const auto tokens =
        static_cast<uint32_t>(std::min<uint64_t>(sequence_, document.count - 1 - at));
    uint64_t targets = tokens;
    if (stream_->masked()) {
      mask.resize(tokens);
      SI_RETURN_IF_ERROR(stream_->read_mask(document.first + at + 1, mask));
      targets = std::accumulate(mask.begin(), mask.end(), uint64_t{0});
    }
    if (targets == 0) {
      left_out_ += tokens;
      continue;
    }
    pieces_.push_back({document.first + at, tokens});
    tokens_ += tokens;
    targets_ += targets;
  }
  return Status();
}

Result<Windows> Windows::of_documents(std::shared_ptr<const TokenStream> stream,
                                      std::span<const Document> documents, uint32_t sequence) {
  Windows out;
  out.stream_ = std::move(stream);
  out.sequence_ = sequence;
  out.has_documents_ = true;
  for (const Document& document : documents) SI_RETURN_IF_ERROR(out.cut(document));
  std::vector<uint64_t> window_of;
  {
    std::vector<uint32_t> lengths;
    for (const Piece& piece : out.pieces_) lengths.push_back(piece.tokens);
    window_of = pack(lengths, sequence);
  }
  // Sorted by window; within one, in the order of the documents.
  for (const uint64_t window : window_of) out.count_ = std::max(out.count_, window + 1);
  out.ends_.assign(out.count_, 0);
  for (const uint64_t window : window_of) ++out.ends_[window];
  std::partial_sum(out.ends_.begin(), out.ends_.end(), out.ends_.begin());
  std::vector<Piece> sorted(out.pieces_.size());
  std::vector<uint64_t> next(out.count_, 0);
  for (size_t w = 1; w < next.size(); ++w) next[w] = out.ends_[w - 1];
  for (size_t i = 0; i < sorted.size(); ++i) sorted[next[window_of[i]]++] = out.pieces_[i];
  out.pieces_ = std::move(sorted);
  return out;
}

Status Windows::read_piece(const Piece& piece, uint64_t vocabulary, std::span<int64_t> tokens,
                           std::span<int64_t> targets) const {
  std::vector<int64_t> read(piece.tokens + size_t{1});
  SI_RETURN_IF_ERROR(stream_->read(piece.first, vocabulary, read));
  std::copy(read.begin(), read.end() - 1, tokens.begin());
  std::copy(read.begin() + 1, read.end(), targets.begin());
  if (!stream_->masked()) return Status();
  std::vector<uint8_t> mask(piece.tokens);
  SI_RETURN_IF_ERROR(stream_->read_mask(piece.first + 1, mask));
  for (size_t i = 0; i < mask.size(); ++i) {
    if (mask[i] == 0) targets[i] = kNoTarget;
  }
  return Status();
}

std::string Windows::describe_packing() const {
  const auto percent = [](uint64_t part, uint64_t whole) {
    return 100 * static_cast<double>(part) / static_cast<double>(std::max<uint64_t>(1, whole));
  };
  std::string text =
      fmt::format("{} documents or pieces of them in {} window{}, {:.1f} % full", pieces_.size(),
                  count_, count_ == 1 ? "" : "s", percent(tokens_, count_ * sequence_));
  if (stream_->masked()) {
    text += fmt::format(", {:.1f} % of their tokens are targets", percent(targets_, tokens_));
  }
  if (left_out_ > 0) text += fmt::format("; {} tokens are left out, without a target", left_out_);
  return text;
}

Status Windows::read_documents(uint64_t window, uint64_t vocabulary, std::span<int64_t> tokens,
                               std::span<int64_t> targets, std::vector<int64_t>& ends) const {
  size_t filled = 0;
  for (uint64_t i = window == 0 ? 0 : ends_[window - 1]; i < ends_[window]; ++i) {
    const Piece& piece = pieces_[i];
    SI_RETURN_IF_ERROR(read_piece(piece, vocabulary, tokens.subspan(filled, piece.tokens),
                                  targets.subspan(filled, piece.tokens)));
    filled += piece.tokens;
    ends.push_back(static_cast<int64_t>(filled));
  }
  if (filled == sequence_) return Status();
  std::ranges::fill(tokens.subspan(filled), 0);
  std::ranges::fill(targets.subspan(filled), kNoTarget);
  ends.push_back(sequence_);
  return Status();
}

Status Windows::read(std::span<const uint64_t> windows, uint64_t vocabulary,
                     std::span<int64_t> tokens, std::span<int64_t> targets,
                     std::vector<int64_t>& document_ends) const {
  SI_CHECK(tokens.size() == windows.size() * sequence_ && targets.size() == tokens.size(),
           "rows of a sequence");
  document_ends.clear();
  std::vector<int64_t> ends;  // in the row
  for (size_t row = 0; row < windows.size(); ++row) {
    SI_CHECK(windows[row] < count_, "a window that there is");
    const size_t begin = row * sequence_;
    const auto tokens_T = tokens.subspan(begin, sequence_);
    const auto targets_T = targets.subspan(begin, sequence_);
    if (!has_documents_) {
      SI_RETURN_IF_ERROR(
          read_piece({windows[row] * sequence_, sequence_}, vocabulary, tokens_T, targets_T));
      continue;
    }
    ends.clear();
    SI_RETURN_IF_ERROR(read_documents(windows[row], vocabulary, tokens_T, targets_T, ends));
    for (const int64_t end : ends) document_ends.push_back(static_cast<int64_t>(begin) + end);
  }
  return Status();
}

}  // namespace smartinf::train
