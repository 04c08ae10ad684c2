#include "smartinf/csd/slot.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/units.h"
#include "smartinf/compress/message.h"
#include "smartinf/kernels/feedback.h"
#include "smartinf/kernels/signs.h"
#include "smartinf/kernels/update.h"

namespace smartinf::csd {
namespace {

using base::kBlockElements;

/// One block of f32 of each thread's own, for what does not go straight to its place.
std::span<float, kBlockElements> thread_block() {
  thread_local const std::unique_ptr<float[]> block = std::make_unique<float[]>(kBlockElements);
  return std::span<float, kBlockElements>(block.get(), kBlockElements);
}

/// Room for an expanded block of any type, of each thread's own.
std::byte* thread_gradient() {
  thread_local const base::AlignedBuffer buffer =
      *base::AlignedBuffer::allocate(kBlockElements * sizeof(float));
  return buffer.data();
}

}  // namespace

PlaneBlocks::PlaneBlocks(storage::Store& store, uint32_t subgroup, std::span<std::byte> extent,
                         uint32_t memory_mask)
    : store_(&store),
      subgroup_(&store.layout().subgroups[subgroup]),
      extent_(extent),
      memory_mask_(memory_mask) {}

uint64_t PlaneBlocks::blocks() const {
  return (subgroup_->count + kBlockElements - 1) / kBlockElements;
}

uint64_t PlaneBlocks::elements(uint64_t block) const {
  return std::min(kBlockElements, subgroup_->count - block * kBlockElements);
}

base::Encoding PlaneBlocks::encoding(size_t plane) const {
  const storage::StoreLayout& layout = store_->layout();
  return base::plane_encoding(layout.format, layout.planes[plane]);
}

std::span<std::byte> PlaneBlocks::bytes(size_t plane, uint64_t block) const {
  const base::Encoding kind = encoding(plane);
  const uint64_t offset = store_->plane_offset(subgroup_->id, plane) +
                          block * base::encoded_bytes(kind, kBlockElements);
  return extent_.subspan(offset, base::encoded_bytes(kind, elements(block)));
}

base::Status PlaneBlocks::verify(size_t plane, uint64_t block) const {
  base::Status status = store_->verify_block(subgroup_->id, plane, block, bytes(plane, block));
  if (status.ok() || (memory_mask_ >> plane & 1u) == 0) return status;
  return base::Status(
      status.code(), "in the state cache " + status.what(),
      "It changed in this machine's memory: test that before you go on. With durability \"step\" "
      "the state on the drive is whole.");
}

void PlaneBlocks::seal(size_t plane, uint64_t block) const {
  store_->seal_block(subgroup_->id, plane, block, bytes(plane, block));
}

void UpdateWork::prepare(const PlaneBlocks& planes, const Update& update, size_t entry,
                         uint32_t subgroup, const std::byte* gradient, bool from_spill,
                         const GradientMemory& memory, const LocalDeviceOptions& options) {
  planes_ = planes;
  update_ = &update;
  weights_out_ = static_cast<std::byte*>(update.updates[entry].weights_out);
  samples_out_ = update.updates[entry].samples_out;
  subgroup_ = subgroup;
  gradient_ = gradient;
  from_spill_ = from_spill;
  memory_ = &memory;
  options_ = &options;
  trace_subgroup_ = planes.subgroup().id.value;
}

base::Status UpdateWork::run_block(uint64_t block) {
  const uint64_t elements = planes_.elements(block);
  const uint64_t first = block * kBlockElements;
  const bool compressed = memory_->compressed();
  const compress::CompressedView message =
      compressed ? memory_->message(subgroup_) : compress::CompressedView();
  const base::DataType gradient_type = compressed ? message.type() : memory_->type();
  const std::byte* gradient = nullptr;
  if (compressed) {
    message.expand_block(block, thread_gradient());
    gradient = thread_gradient();
  } else {
    gradient = gradient_ + first * base::data_type_bytes(gradient_type);
  }
  if (from_spill_ &&
      !memory_->verify_block(subgroup_, block,
                             {gradient, elements * base::data_type_bytes(gradient_type)})) {
    return base::Status(base::ErrorCode::kCorrupt,
                        "block " + std::to_string(block) + " of the spilled gradient of subgroup " +
                            std::to_string(planes_.subgroup().id.value) +
                            " is not what was written",
                        "The step is aborted and can be repeated; if it happens again, the drive "
                        "or its cable is failing.");
  }
  const std::span<const base::PlaneKind> kinds =
      kernels::rule_planes(update_->scalars.front().rule);
  kernels::UpdateBlock work;
  for (size_t plane = 0; plane < kinds.size(); ++plane) {
    SI_RETURN_IF_ERROR(planes_.verify(plane, block));
    work.planes[plane] = planes_.bytes(plane, block).data();
  }
  work.count = elements;
  work.element = planes_.subgroup().first_element + first;
  work.gradient = gradient;
  work.gradient_type = gradient_type;
  if (weights_out_ != nullptr) {
    work.weights_out = weights_out_ + first * base::data_type_bytes(update_->weights_type);
  }
  work.weights_type = update_->weights_type;

  // Cleared, not freed: no allocation after the first blocks.
  thread_local std::vector<kernels::ScalarsSpan> runs;
  runs.clear();
  const std::vector<plan::GroupSpan>& groups = options_->groups;
  if (groups.empty()) {
    runs.push_back({elements, update_->scalars.data()});
  } else {
    auto span = std::upper_bound(
        groups.begin(), groups.end(), work.element,
        [](uint64_t element, const plan::GroupSpan& s) { return element < s.first; });
    --span;
    for (uint64_t element = work.element; element < work.element + elements; ++span) {
      const uint64_t end = std::min(work.element + elements, span->first + span->count);
      runs.push_back({end - element, &update_->scalars[span->group]});
      element = end;
    }
  }
  if (compressed && message.factors() > 0) {
    if (!kernels::takes_squares(update_->scalars.front().rule)) {
      return base::Status(base::ErrorCode::kMismatch,
                          "a message with factors of squares for a rule without Adam's variance",
                          "This is a bug in the engine; please report it.");
    }
    work.squares = take_squares(message, block);
  }
  kernels::kernels().update_block(planes_.format(), work, runs);
  if (samples_out_ != nullptr) send_samples(block);
  for (size_t plane = 0; plane < kinds.size(); ++plane) planes_.seal(plane, block);
  return base::Status();
}

std::span<const kernels::SquaresRow> UpdateWork::take_squares(
    const compress::CompressedView& message, uint64_t block) {
  // Cleared, not freed.
  thread_local std::vector<kernels::SquaresRow> squares;
  thread_local std::vector<float> means;
  squares.clear();
  const storage::StoredSubgroup& subgroup = planes_.subgroup();
  const uint64_t first = subgroup.first_element + block * kBlockElements;
  const uint64_t end = first + planes_.elements(block);
  float* columns = thread_block().data();  // of all parts: no more than the block has elements
  uint64_t factors = 0;                    // of the parts before
  uint64_t run = 0;
  for (const compress::MatrixLayout& matrix :
       compress::matrices_in(options_->matrices, subgroup.first_element, subgroup.count)) {
    const compress::MatrixPart sent =
        compress::part_of(matrix, subgroup.first_element, subgroup.count);
    const uint64_t means_at = factors;
    const uint64_t rows_run = run;
    const uint64_t columns_run = run + 1;
    factors += sent.factors();
    run += compress::kRunsOfMatrix;
    if (matrix.end() <= first) continue;
    if (matrix.first >= end) break;
    const compress::MatrixPart part = compress::part_of(matrix, first, end - first);
    means.resize(part.rows());
    const uint64_t rows_at = means_at + part.first_row() - sent.first_row();
    message.read_factors(rows_run, rows_at, means);
    // From the part's first column on and round the end, as far as it reaches.
    const uint64_t turn =
        (part.first_column() + matrix.columns - sent.first_column()) % matrix.columns;
    const uint64_t some = std::min(part.columns(), sent.columns() - turn);
    const uint64_t columns_at = means_at + sent.rows();
    message.read_factors(columns_run, columns_at + turn, {columns, some});
    message.read_factors(columns_run, columns_at, {columns + some, part.columns() - some});
    part.each_row([&](uint64_t row, uint64_t column, uint64_t count) {
      squares.push_back({count, means[row], columns + column});
    });
    columns += part.columns();
  }
  return squares;
}

void UpdateWork::send_samples(uint64_t block) {
  SI_CHECK(!options_->matrices.empty(), "samples of matrices that the device knows");
  const size_t plane = kernels::variance_plane(update_->scalars.front().rule);
  const uint64_t elements = planes_.elements(block);
  const std::byte* bytes = planes_.bytes(plane, block).data();
  const float* variances = reinterpret_cast<const float*>(bytes);
  if (planes_.encoding(plane) != base::Encoding::kF32) {
    float* decoded = thread_block().data();
    kernels::kernels().decode_block(planes_.encoding(plane), base::PlaneKind::kVariance, bytes,
                                    decoded, elements);
    variances = decoded;
  }
  const uint64_t first = planes_.subgroup().first_element + block * kBlockElements;
  compress::take_samples(options_->matrices, first, {variances, elements}, samples_out_);
}

uint64_t DecodeWork::prepare(const PlaneBlocks& planes, const PlaneBlocks& cached,
                             uint32_t cached_mask, const ReadState& read) {
  planes_ = planes;
  cached_ = cached;
  cached_mask_ = cached_mask;
  read_ = &read;
  trace_subgroup_ = planes.subgroup().id.value;
  return (read.count + kBlockElements - 1) / kBlockElements;
}

base::Status DecodeWork::run_block(uint64_t index) {
  const uint64_t block = read_->first / kBlockElements + index;
  const uint64_t elements = planes_.elements(block);
  const uint64_t wanted = std::min(elements, read_->count - index * kBlockElements);
  for (size_t plane = 0; plane < planes_.planes().size(); ++plane) {
    if (read_->planes[plane] == nullptr) continue;
    const PlaneBlocks& from = (cached_mask_ >> plane & 1u) != 0 ? cached_ : planes_;
    SI_RETURN_IF_ERROR(from.verify(plane, block));
    float* out = read_->planes[plane] + index * kBlockElements;
    float* decoded = wanted == elements ? out : thread_block().data();
    kernels::kernels().decode_block(planes_.encoding(plane), planes_.planes()[plane],
                                    from.bytes(plane, block).data(), decoded, elements);
    if (decoded != out) std::memcpy(out, decoded, wanted * sizeof(float));
  }
  return base::Status();
}

void EncodeWork::prepare(const PlaneBlocks& planes, const WriteState& write) {
  planes_ = planes;
  write_ = &write;
  trace_subgroup_ = planes.subgroup().id.value;
}

base::Status EncodeWork::run_block(uint64_t block) {
  const uint64_t elements = planes_.elements(block);
  const uint64_t first = block * kBlockElements;
  for (size_t plane = 0; plane < planes_.planes().size(); ++plane) {
    if ((write_->plane_mask >> plane & 1u) == 0) continue;
    if (planes_.planes()[plane] == base::PlaneKind::kResidual && write_->residual != nullptr) {
      std::memcpy(planes_.bytes(plane, block).data(), write_->residual + first,
                  elements * sizeof(base::Bf16));
      planes_.seal(plane, block);
      continue;
    }
    const float* in = write_->planes[plane];
    if (in != nullptr) {
      in += first;
    } else {
      const std::span<float> zeros = thread_block().first(elements);
      std::fill(zeros.begin(), zeros.end(), 0.0f);
      in = zeros.data();
    }
    kernels::kernels().encode_block(planes_.encoding(plane), planes_.planes()[plane], in,
                                    planes_.bytes(plane, block).data(), elements,
                                    planes_.subgroup().first_element + first, 0, 0);
    planes_.seal(plane, block);
  }
  return base::Status();
}

}  // namespace smartinf::csd
