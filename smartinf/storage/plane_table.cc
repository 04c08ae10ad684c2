#include "smartinf/storage/plane_table.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"

namespace smartinf::storage {

using base::ErrorCode;
using base::Status;
using base::StepNumber;

Status PlaneTable::allocate() {
  SI_ASSIGN_OR_RETURN(images_,
                      base::AlignedBuffer::allocate(kTablePlaces * geometry_.table_bytes_max()));
  uint64_t blocks = 0;
  for (size_t subgroup = 0; subgroup < geometry_.subgroups(); ++subgroup) {
    for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
      sealed_first_.push_back(blocks);
      blocks += geometry_.blocks(subgroup);
    }
  }
  sealed_.resize(blocks);
  held_.resize(sealed_first_.size());
  return Status();
}

std::span<std::byte> PlaneTable::image(StepNumber step) const {
  return images_.bytes().subspan(step % kTablePlaces * geometry_.table_bytes_max(),
                                 geometry_.table_bytes_max());
}

PlaneRecord PlaneTable::record(StepNumber step, size_t subgroup, size_t plane) const {
  PlaneRecord found;
  std::memcpy(&found, image(step).data() + geometry_.record_offset(subgroup, plane), sizeof(found));
  return found;
}

void PlaneTable::set_record(StepNumber step, size_t subgroup, size_t plane,
                            const PlaneRecord& record) {
  std::memcpy(image(step).data() + geometry_.record_offset(subgroup, plane), &record,
              sizeof(record));
}

uint64_t* PlaneTable::checksums(StepNumber step, size_t subgroup, size_t plane) const {
  // Records are multiples of 8 bytes on an aligned image.
  return reinterpret_cast<uint64_t*>(image(step).data() + geometry_.record_offset(subgroup, plane) +
                                     sizeof(PlaneRecord));
}

void PlaneTable::begin_first(StepNumber step) {
  const std::span<std::byte> first = image(step);
  std::fill(first.begin(), first.end(), std::byte{0});
  for (size_t subgroup = 0; subgroup < geometry_.subgroups(); ++subgroup) {
    for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
      PlaneRecord empty{};
      empty.blocks = static_cast<uint32_t>(geometry_.blocks(subgroup));
      set_record(step, subgroup, plane, empty);
    }
  }
  std::fill(sealed_.begin(), sealed_.end(), uint8_t{0});
}

void PlaneTable::begin_after(StepNumber committed) {
  std::memcpy(image(committed + 1).data(), image(committed).data(),
              geometry_.table_records_bytes());
  std::fill(sealed_.begin(), sealed_.end(), uint8_t{0});
}

void PlaneTable::note_written(StepNumber step, size_t subgroup, size_t plane, uint32_t slot,
                              bool sealed) {
  PlaneRecord written = record(step, subgroup, plane);
  written.step = step;
  written.slot = static_cast<uint8_t>(slot);
  written.flags = sealed ? kPlaneWritten | kPlaneSealed : kPlaneWritten;
  set_record(step, subgroup, plane, written);
}

void PlaneTable::set_checksum(StepNumber step, size_t subgroup, size_t plane, uint64_t block,
                              uint64_t checksum) {
  checksums(step, subgroup, plane)[block] = checksum;
  sealed_[sealed_first_[plane_index(subgroup, plane)] + block] = 1;
}

Status PlaneTable::check_written(StepNumber step, bool step_wrote) const {
  for (size_t subgroup = 0; subgroup < geometry_.subgroups(); ++subgroup) {
    for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
      const PlaneRecord found = record(step, subgroup, plane);
      if ((found.flags & kPlaneWritten) == 0) {
        return Status(ErrorCode::kFailedPrecondition,
                      fmt::format("the {} plane of subgroup {} has not been written",
                                  base::plane_kind_name(layout_.planes[plane]),
                                  layout_.subgroups[subgroup].id.value));
      }
      if (found.step != step || (found.flags & kPlaneSealed) == 0 || !step_wrote) continue;
      const auto blocks = std::span(sealed_).subspan(sealed_first_[plane_index(subgroup, plane)],
                                                     geometry_.blocks(subgroup));
      if (std::find(blocks.begin(), blocks.end(), uint8_t{0}) != blocks.end()) {
        return Status(
            ErrorCode::kFailedPrecondition,
            fmt::format("the {} plane of subgroup {} was written, but its checksums are missing",
                        base::plane_kind_name(layout_.planes[plane]),
                        layout_.subgroups[subgroup].id.value));
      }
    }
  }
  return Status();
}

std::span<std::byte> PlaneTable::finish(StepNumber step, const std::string& client_metadata) {
  const std::span<std::byte> whole = image(step);
  TableHeader header{};
  header.magic = kTableMagic;
  header.step = step;
  header.client_metadata_bytes = client_metadata.size();
  header.bytes = geometry_.table_records_bytes() + client_metadata.size();
  std::memcpy(whole.data(), &header, sizeof(header));
  std::memcpy(whole.data() + geometry_.table_records_bytes(), client_metadata.data(),
              client_metadata.size());
  const uint64_t length = base::round_up(header.bytes, base::kIoAlignment);
  std::fill(whole.begin() + static_cast<std::ptrdiff_t>(header.bytes),
            whole.begin() + static_cast<std::ptrdiff_t>(length), std::byte{0});
  header.checksum = base::checksum(whole.subspan(16, header.bytes - 16),
                                   table_seed(layout_.run, layout_.device_index, step));
  std::memcpy(whole.data(), &header, sizeof(header));
  return whole.first(length);
}

TableHeader PlaneTable::header(StepNumber step) const {
  TableHeader header;
  std::memcpy(&header, image(step).data(), sizeof(header));
  return header;
}

std::string PlaneTable::client_metadata(StepNumber step) const {
  return std::string(
      reinterpret_cast<const char*>(image(step).data() + geometry_.table_records_bytes()),
      header(step).client_metadata_bytes);
}

void PlaneTable::hold(size_t subgroup, uint32_t plane_mask) {
  for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
    if ((plane_mask >> plane & 1u) == 0) continue;
    held_count_ += 1u - std::exchange(held_[plane_index(subgroup, plane)], uint8_t{1});
  }
}

void PlaneTable::forget_held(size_t subgroup, uint32_t plane_mask) {
  for (size_t plane = 0; plane < geometry_.planes(); ++plane) {
    if ((plane_mask >> plane & 1u) == 0) continue;
    held_count_ -= std::exchange(held_[plane_index(subgroup, plane)], uint8_t{0});
  }
}

}  // namespace smartinf::storage
