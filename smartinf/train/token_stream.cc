#include "smartinf/train/token_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Status;

void TokenStream::add(TokenSegment segment) {
  if (segment.count == 0) return;
  count_ += segment.count;
  masked_ = masked_ || segment.mask_offset != 0;
  segments_.push_back(std::move(segment));
  ends_.push_back(count_);
}

TokenStream::Part TokenStream::part_at(uint64_t first, uint64_t count_max) const {
  const auto index =
      static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
  const TokenSegment& segment = segments_[index];
  const uint64_t at = first - (ends_[index] - segment.count);
  return {segment, at, std::min(segment.count - at, count_max)};
}

Status TokenStream::read(uint64_t first, uint64_t vocabulary, std::span<int64_t> out) const {
  SI_CHECK(first + out.size() <= count_, "tokens beyond the end of the stream");
  for (size_t done = 0; done < out.size();) {
    const Part part = part_at(first + done, out.size() - done);
    const TokenSegment& segment = part.segment;
    const uint32_t token_bytes = segment.token_bytes;
    std::vector<std::byte> read;
    const std::byte* token = segment.data + part.at * token_bytes;
    if (segment.file != nullptr) {
      read.resize(part.count * token_bytes);
      SI_RETURN_IF_ERROR(segment.file->read(segment.offset + part.at * token_bytes, read));
      token = read.data();
    }
    for (uint64_t i = 0; i < part.count; ++i, token += token_bytes) {
      uint32_t value = 0;
      std::memcpy(&value, token, token_bytes);
      if (value >= vocabulary) {
        return Status(ErrorCode::kCorrupt,
                      fmt::format("token {} at position {} is not below model.vocabulary ({})",
                                  value, part.at + i, vocabulary),
                      "Set model.vocabulary to the tokenizer's size",
                      base::ErrorPlace{segment.path, {}, {}, 0});
      }
      out[done++] = value;
    }
  }
  return Status();
}

Status TokenStream::read_mask(uint64_t first, std::span<uint8_t> out) const {
  SI_CHECK(first + out.size() <= count_, "tokens beyond the end of the stream");
  for (size_t done = 0; done < out.size();) {
    const Part part = part_at(first + done, out.size() - done);
    const TokenSegment& segment = part.segment;
    const std::span<uint8_t> mask = out.subspan(done, part.count);
    done += part.count;
    if (segment.mask_offset == 0) {
      std::ranges::fill(mask, uint8_t{1});
      continue;
    }
    const uint64_t offset = segment.mask_offset + part.at;
    SI_RETURN_IF_ERROR(segment.file->read(offset, std::as_writable_bytes(mask)));
    const auto wrong = std::ranges::find_if(mask, [](uint8_t value) { return value > 1; });
    if (wrong == mask.end()) continue;
    const auto index = static_cast<uint64_t>(wrong - mask.begin());
    return Status(
        ErrorCode::kCorrupt,
        fmt::format("loss_mask has {} for token {}; 0 and 1 are allowed", *wrong, part.at + index),
        "Make the token file anew with scripts/make_token_files.py",
        base::ErrorPlace{segment.path, offset + index, {}, 0});
  }
  return Status();
}

}  // namespace smartinf::train
