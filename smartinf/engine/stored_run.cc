#include "smartinf/engine/stored_run.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/kernels/update.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/row_commit.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;

uint64_t StoredRun::subgroup_elements() const {
  uint64_t most = 0;
  for (const Piece& piece : pieces) most = std::max(most, piece.count);
  return most;
}

uint64_t StoredRun::state_bytes() const {
  uint64_t bytes = 0;
  for (const auto& device : devices) {
    // Bytes of a subgroup do not depend on how many of it there is room for.
    const auto geometry = storage::Geometry::make(device->layout(), 1);
    SI_CHECK(geometry.ok(), "a snapshot with a layout that is none");
    for (size_t i = 0; i < geometry->subgroups(); ++i) bytes += geometry->extent_bytes(i);
  }
  if (tables != nullptr) bytes += tables->bytes();
  return bytes;
}

const StoredRun::Piece& StoredRun::at(uint64_t element) const {
  const auto behind =
      std::upper_bound(pieces.begin(), pieces.end(), element,
                       [](uint64_t value, const Piece& piece) { return value < piece.first; });
  return *std::prev(behind);
}

Result<StoredRun> open_stored_run(const DeviceSources& sources, storage::ReaderLock lock) {
  std::vector<std::unique_ptr<csd::Snapshot>> devices;
  for (const auto& source : sources) {
    auto device = source->snapshot(lock);
    if (!device.ok()) return std::move(device).status().with_context("device " + source->name());
    devices.push_back(std::move(*device));
  }
  return join_snapshots(std::move(devices));
}

Result<StoredRun> join_snapshots(std::vector<std::unique_ptr<csd::Snapshot>> devices) {
  StoredRun run;
  run.devices = std::move(devices);
  std::vector<storage::StoreState> states;
  for (const auto& device : run.devices) states.push_back(device->state());
  SI_ASSIGN_OR_RETURN(run.step, storage::recovery_step(states));
  std::sort(run.devices.begin(), run.devices.end(), [](const auto& a, const auto& b) {
    return a->state().device_index < b->state().device_index;
  });
  SI_ASSIGN_OR_RETURN(run.description, run_description_from_json(run.layout().description));
  for (size_t device = 0; device < run.devices.size(); ++device) {
    csd::Snapshot& snapshot = *run.devices[device];
    const storage::StoreLayout& layout = snapshot.layout();
    if (layout.description != run.layout().description || layout.planes != run.layout().planes ||
        layout.format != run.layout().format) {
      return Status(ErrorCode::kMismatch, "the devices of one run hold states of different kinds",
                    "Run smartinf inspect on each of them.",
                    base::ErrorPlace{snapshot.name(), {}, {}, 0});
    }
    SI_RETURN_IF_ERROR(snapshot.choose_step(run.step));
    for (size_t i = 0; i < layout.subgroups.size(); ++i) {
      run.pieces.push_back(
          {layout.subgroups[i].first_element, layout.subgroups[i].count, device, i});
    }
  }
  run.client_metadata =
      storage::split_row_commit(run.devices.front()->client_metadata()).client_metadata;
  std::vector<csd::Snapshot*> snapshots;
  for (const auto& device : run.devices) snapshots.push_back(device.get());
  SI_ASSIGN_OR_RETURN(run.tables, StoredTables::open(snapshots));
  std::sort(run.pieces.begin(), run.pieces.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  uint64_t next = 0;
  for (const StoredRun::Piece& piece : run.pieces) {
    // Blocks of a state are the same wherever it is cut; the cuts fall between blocks.
    if (piece.first != next || piece.first % base::kBlockElements != 0) {
      return Status(ErrorCode::kCorrupt,
                    fmt::format("the devices together do not hold every parameter once: element {} "
                                "is missing or there twice",
                                next),
                    "Run smartinf fsck on them.");
    }
    next += piece.count;
  }
  if (next != run.description.space.count()) {
    return Status(ErrorCode::kCorrupt,
                  fmt::format("the devices together hold {} of {} parameters", next,
                              run.description.space.count()),
                  "Run smartinf fsck on them.");
  }
  return run;
}

ElementReader::ElementReader(StoredRun& run) : run_(run), blocks_(run.layout().planes.size()) {}

Status ElementReader::fetch(size_t plane, uint64_t element) {
  const StoredRun::Piece& piece = run_.at(element);
  const uint64_t block = (element - piece.first) / base::kBlockElements;
  const uint64_t within = block * base::kBlockElements;
  const uint64_t count = std::min(base::kBlockElements, piece.count - within);
  const base::PlaneKind kind = run_.layout().planes[plane];
  const base::Encoding encoding = base::plane_encoding(run_.layout().format, kind);
  encoded_.resize(base::encoded_bytes(encoding, count));
  blocks_[plane].values.clear();
  SI_RETURN_IF_ERROR(
      run_.devices[piece.device]->read_blocks(piece.subgroup, plane, block, 1, encoded_));
  blocks_[plane].first = piece.first + within;
  blocks_[plane].values.resize(count);
  kernels::kernels().decode_block(encoding, kind, encoded_.data(), blocks_[plane].values.data(),
                                  count);
  return Status();
}

Status ElementReader::read(size_t plane, uint64_t first, std::span<float> out) {
  while (!out.empty()) {
    const Block& block = blocks_[plane];
    if (first < block.first || first - block.first >= block.values.size()) {
      SI_RETURN_IF_ERROR(fetch(plane, first));
    }
    const std::span<const float> rest = std::span(block.values).subspan(first - block.first);
    const size_t here = std::min(out.size(), rest.size());
    std::copy_n(rest.begin(), here, out.begin());
    out = out.subspan(here);
    first += here;
  }
  return Status();
}

Status ElementReader::check() {
  for (const StoredRun::Piece& piece : run_.pieces) {
    for (uint64_t done = 0; done < piece.count; done += base::kBlockElements) {
      for (size_t plane = 0; plane < blocks_.size(); ++plane) {
        SI_RETURN_IF_ERROR(fetch(plane, piece.first + done));
      }
    }
  }
  return Status();
}

}  // namespace smartinf::engine
