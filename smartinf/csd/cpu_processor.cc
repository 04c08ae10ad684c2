#include "smartinf/csd/cpu_processor.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/clock.h"
#include "smartinf/csd/core_pinning.h"
#include "smartinf/csd/gradient_memory.h"
#include "smartinf/csd/job_errors.h"
#include "smartinf/kernels/update.h"

namespace smartinf::csd {
namespace {

using base::kBlockElements;
using base::Status;

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

/// The second moment of a block as its message has it, in memory of the thread's own.
std::span<const kernels::SecondMomentRow> second_moment_rows(const UpdateJob& job, uint64_t block) {
  const compress::CompressedView& message = job.gradient.compressed;
  // Cleared, not freed.
  thread_local std::vector<kernels::SecondMomentRow> rows;
  thread_local std::vector<float> means;
  rows.clear();
  const storage::StoredSubgroup& subgroup = job.planes.subgroup();
  const uint64_t first = subgroup.first_element + block * kBlockElements;
  const uint64_t end = first + job.planes.elements(block);
  float* columns = thread_block().data();  // of all parts: no more than the block has elements
  uint64_t factors = 0;                    // of the parts before
  uint64_t run = 0;
  for (const compress::MatrixLayout& matrix :
       compress::matrices_in(job.matrices, subgroup.first_element, subgroup.count)) {
    const compress::MatrixPart sent =
        compress::part_of(matrix, subgroup.first_element, subgroup.count);
    const uint64_t means_at = factors;
    const uint64_t rows_run = run;
    const uint64_t columns_run = run + 1;
    factors += sent.factors();
    run += compress::kFactorRunsPerMatrix;
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
      rows.push_back({count, means[row], columns + column});
    });
    columns += part.columns();
  }
  return rows;
}

/// A plane's values of a block as f32: where they lie, or decoded into memory of the thread's own.
const float* values_of(const PlaneBlocks& planes, size_t plane, uint64_t block) {
  const std::byte* bytes = planes.bytes(plane, block).data();
  if (planes.encoding(plane) == base::Encoding::kF32) {
    return reinterpret_cast<const float*>(bytes);
  }
  float* decoded = thread_block().data();
  kernels::kernels().decode_block(planes.encoding(plane), planes.planes()[plane], bytes, decoded,
                                  planes.elements(block));
  return decoded;
}

void send_samples(const UpdateJob& job, uint64_t block) {
  SI_CHECK(!job.matrices.empty(), "samples of matrices that the device knows");
  const PlaneBlocks& planes = job.planes;
  const size_t plane = kernels::variance_plane(job.scalars.front().rule);
  const uint64_t first = planes.subgroup().first_element + block * kBlockElements;
  compress::take_samples(job.matrices, first,
                         {values_of(planes, plane, block), planes.elements(block)},
                         job.samples_out);
}

/// The block's elements by their group's scalars, in memory of the thread's own.
std::span<const kernels::ScalarsSpan> scalars_of(const UpdateJob& job, uint64_t first,
                                                 uint64_t elements) {
  // Cleared, not freed: no allocation after the first blocks.
  thread_local std::vector<kernels::ScalarsSpan> spans;
  spans.clear();
  if (job.groups.empty()) {
    spans.push_back({elements, job.scalars.data()});
    return spans;
  }
  auto group = std::upper_bound(
      job.groups.begin(), job.groups.end(), first,
      [](uint64_t element, const plan::GroupSpan& span) { return element < span.first; });
  --group;
  for (uint64_t element = first; element < first + elements; ++group) {
    const uint64_t end = std::min(first + elements, group->first + group->count);
    spans.push_back({end - element, &job.scalars[group->group]});
    element = end;
  }
  return spans;
}

/// The block's gradient, expanded where it came compressed.
base::Result<const std::byte*> gradient_of(const UpdateJob& job, uint64_t block) {
  const GradientView& gradient = job.gradient;
  if (gradient.dense == nullptr) {
    gradient.compressed.expand_block(block, thread_gradient());
    return static_cast<const std::byte*>(thread_gradient());
  }
  const uint64_t element_bytes = base::data_type_bytes(gradient.type);
  const std::byte* bytes = gradient.dense + block * kBlockElements * element_bytes;
  if (gradient.memory != nullptr &&
      !gradient.memory->verify_block(gradient.subgroup, block,
                                     {bytes, job.planes.elements(block) * element_bytes})) {
    return damaged_gradient(job.planes, block);
  }
  return bytes;
}

/// The block's state is read from memory once and written once.
Status run(const UpdateJob& job, uint64_t block) {
  const PlaneBlocks& planes = job.planes;
  const kernels::UpdateRule rule = job.scalars.front().rule;
  const std::span<const base::PlaneKind> kinds = kernels::rule_planes(rule);
  kernels::UpdateBlock work;
  SI_ASSIGN_OR_RETURN(work.gradient, gradient_of(job, block));
  for (size_t plane = 0; plane < kinds.size(); ++plane) {
    SI_RETURN_IF_ERROR(planes.verify(plane, block));
    work.planes[plane] = planes.bytes(plane, block).data();
  }
  const uint64_t first = block * kBlockElements;
  work.count = planes.elements(block);
  work.element = planes.subgroup().first_element + first;
  const bool compressed = job.gradient.dense == nullptr;
  work.gradient_type = compressed ? job.gradient.compressed.type() : job.gradient.type;
  if (job.weights_out != nullptr) {
    work.weights_out =
        static_cast<std::byte*>(job.weights_out) + first * base::data_type_bytes(job.weights_type);
  }
  work.weights_type = job.weights_type;
  if (compressed && job.gradient.compressed.factors() > 0) {
    if (!kernels::takes_factored_second_moment(rule)) return factors_without_variance();
    work.second_moment = second_moment_rows(job, block);
  }
  kernels::kernels().update_block(planes.format(), work, scalars_of(job, work.element, work.count));
  if (job.samples_out != nullptr) send_samples(job, block);
  for (size_t plane = 0; plane < kinds.size(); ++plane) planes.seal(plane, block);
  return Status();
}

Status run(const DecodeJob& job, uint64_t index) {
  const ReadState& read = *job.read;
  const PlaneBlocks& planes = job.planes;
  const uint64_t block = read.first / kBlockElements + index;
  const uint64_t elements = planes.elements(block);
  const uint64_t wanted = std::min(elements, read.count - index * kBlockElements);
  for (size_t plane = 0; plane < planes.planes().size(); ++plane) {
    if (read.planes[plane] == nullptr) continue;
    const PlaneBlocks& from = (job.cached_mask >> plane & 1u) != 0 ? job.cached : planes;
    SI_RETURN_IF_ERROR(from.verify(plane, block));
    float* out = read.planes[plane] + index * kBlockElements;
    float* decoded = wanted == elements ? out : thread_block().data();
    kernels::kernels().decode_block(planes.encoding(plane), planes.planes()[plane],
                                    from.bytes(plane, block).data(), decoded, elements);
    if (decoded != out) std::memcpy(out, decoded, wanted * sizeof(float));
  }
  return Status();
}

Status run(const EncodeJob& job, uint64_t block) {
  const WriteState& write = *job.write;
  const PlaneBlocks& planes = job.planes;
  const uint64_t elements = planes.elements(block);
  const uint64_t first = block * kBlockElements;
  for (size_t plane = 0; plane < planes.planes().size(); ++plane) {
    if ((write.plane_mask >> plane & 1u) == 0) continue;
    if (planes.planes()[plane] == base::PlaneKind::kResidual && write.residual != nullptr) {
      std::memcpy(planes.bytes(plane, block).data(), write.residual + first,
                  elements * sizeof(base::Bf16));
      planes.seal(plane, block);
      continue;
    }
    const float* in = write.planes[plane];
    if (in != nullptr) {
      in += first;
    } else {
      const std::span<float> zeros = thread_block().first(elements);
      std::fill(zeros.begin(), zeros.end(), 0.0f);
      in = zeros.data();
    }
    kernels::kernels().encode_block(planes.encoding(plane), planes.planes()[plane], in,
                                    planes.bytes(plane, block).data(), elements,
                                    planes.subgroup().first_element + first, 0, 0);
    planes.seal(plane, block);
  }
  return Status();
}

Status run(const CastJob& job, uint64_t block) {
  constexpr size_t kMaster = 0;
  const PlaneBlocks& planes = job.planes;
  SI_RETURN_IF_ERROR(planes.verify(kMaster, block));
  kernels::kernels().cast_from_f32(values_of(planes, kMaster, block),
                                   static_cast<std::byte*>(job.weights_out) +
                                       block * kBlockElements * base::data_type_bytes(job.type),
                                   job.type, planes.elements(block));
  return Status();
}

const char* trace_name(const Job& job) {
  constexpr std::array<const char*, 4> kNames{"update", "decode", "encode", "cast"};
  return kNames[job.work.index()];
}

uint32_t subgroup_of(const Job& job) {
  return std::visit([](const auto& work) { return work.planes.subgroup().id.value; }, job.work);
}

class HostSlotMemory final : public SlotMemory {
 public:
  explicit HostSlotMemory(base::AlignedBuffer buffer) : buffer_(std::move(buffer)) {}
  std::span<std::byte> bytes() const override { return buffer_.bytes(); }

 private:
  base::AlignedBuffer buffer_;
};

}  // namespace

uint64_t blocks_of(const Job& job) {
  // A ReadState wants some of its subgroup's blocks.
  if (const auto* decode = std::get_if<DecodeJob>(&job.work)) {
    return base::divide_up(decode->read->count, kBlockElements);
  }
  return std::visit([](const auto& work) { return work.planes.blocks(); }, job.work);
}

Status run_block(const Job& job, uint64_t block) {
  return std::visit([block](const auto& work) { return run(work, block); }, job.work);
}

CpuProcessor::CpuProcessor(const CpuProcessorOptions& options,
                           std::function<void(Job&)> on_finished)
    : on_finished_(std::move(on_finished)), trace_(options.trace) {
  for (uint32_t i = 0; i < std::max(1u, options.threads); ++i) {
    uint32_t track = 0;
    if (trace_ != nullptr) {
      track = trace_->add_track({options.name, "processor " + std::to_string(i)});
    }
    auto& worker = workers_.emplace_back(
        "si-processor",
        [this, track](const std::shared_ptr<Running>& running) { run(*running, track); });
    if (!options.cores.empty()) {
      pin_thread(worker.threads().front(), options.cores[i % options.cores.size()]);
    }
  }
}

base::Result<std::unique_ptr<SlotMemory>> CpuProcessor::allocate(uint64_t bytes) {
  SI_ASSIGN_OR_RETURN(base::AlignedBuffer buffer, base::AlignedBuffer::allocate(bytes));
  return std::unique_ptr<SlotMemory>(std::make_unique<HostSlotMemory>(std::move(buffer)));
}

void CpuProcessor::start(Job& job) {
  job.status = Status();
  const uint64_t blocks = blocks_of(job);
  SI_CHECK(blocks > 0, "a subgroup has at least one block");
  const auto running = std::make_shared<Running>(job, blocks);
  for (auto& worker : workers_) worker.post(running);
}

void CpuProcessor::run(Running& running, uint32_t track) {
  for (uint64_t block = running.next++; block < running.blocks; block = running.next++) {
    Job& job = running.job;
    const uint64_t begin_ns = trace_ != nullptr ? base::now_ns() : 0;
    Status status = running.failed ? Status() : run_block(job, block);
    if (trace_ != nullptr) {
      trace_->record({trace_name(job), track, subgroup_of(job), begin_ns, base::now_ns()});
    }
    if (!status.ok() && !running.failed.exchange(true)) job.status = std::move(status);
    if (--running.unfinished == 0) on_finished_(job);
  }
}

}  // namespace smartinf::csd
