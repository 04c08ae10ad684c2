#include "smartinf/train/read_batch.h"

#include <algorithm>

namespace smartinf::train {

using torch::Tensor;

base::Result<Batch> read_batch(const Windows& from, std::span<const uint64_t> windows,
                               uint64_t vocabulary, uint32_t sequence, torch::Device device) {
  const size_t tokens = windows.size() * sequence;
  const auto shape = {static_cast<int64_t>(windows.size()), int64_t{sequence}};
  const Tensor tokens_BT = torch::empty(shape, torch::kInt64);
  const Tensor targets_BT = torch::empty(shape, torch::kInt64);
  const std::span<int64_t> targets(targets_BT.data_ptr<int64_t>(), tokens);
  Batch batch;
  SI_RETURN_IF_ERROR(from.read(windows, vocabulary, {tokens_BT.data_ptr<int64_t>(), tokens},
                               targets, batch.document_ends));
  batch.targets = tokens - static_cast<uint64_t>(std::ranges::count(targets, kNoTarget));
  batch.tokens_BT = tokens_BT.to(device);
  batch.targets_BT = targets_BT.to(device);
  return batch;
}

}  // namespace smartinf::train
