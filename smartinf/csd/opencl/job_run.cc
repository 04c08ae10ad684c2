#include "smartinf/csd/opencl/job_run.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "smartinf/base/units.h"
#include "smartinf/csd/gradient_memory.h"
#include "smartinf/csd/job_errors.h"
#include "smartinf/csd/opencl/host_side.h"
#include "smartinf/kernels/rules.h"

namespace smartinf::csd::opencl {
namespace {

using base::kBlockElements;
using base::Status;

OpenClTraffic::What what_of(base::PlaneKind kind) {
  switch (kind) {
    case base::PlaneKind::kMaster:
      return OpenClTraffic::kMaster;
    case base::PlaneKind::kMomentum:
      return OpenClTraffic::kMomentum;
    case base::PlaneKind::kVariance:
      return OpenClTraffic::kVariance;
    case base::PlaneKind::kResidual:
      break;
  }
  return OpenClTraffic::kResidual;
}

const PlaneBlocks& source_of(const DecodeJob& job, size_t plane) {
  return (job.cached_mask >> plane & 1u) != 0 ? job.cached : job.planes;
}

/// The last one that is decoded out of these.
size_t last_plane(const PlaneBlocks& from, const DecodeJob& job) {
  size_t last = 0;
  for (size_t plane = 0; plane < from.planes().size(); ++plane) {
    if (job.read->planes[plane] != nullptr && &source_of(job, plane) == &from) last = plane;
  }
  return last;
}

const std::byte* bytes_at(const void* host) { return static_cast<const std::byte*>(host); }
std::byte* bytes_at(void* host) { return static_cast<std::byte*>(host); }

}  // namespace

base::Result<Place> JobRun::place(const std::byte* host, uint64_t bytes) {
  if (device_.memory == OpenClMemory::kShared) {
    // Memory that kernels only read is not written.
    SI_ASSIGN_OR_RETURN(const cl_mem buffer, buffers_.borrow(const_cast<std::byte*>(host), bytes));
    return Place{buffer, 0, false};
  }
  for (const std::shared_ptr<Region>& region : regions_) {
    if (!region->contains(host)) continue;
    return Place{region->on_device(), region->at(host), device_.memory == OpenClMemory::kCopied};
  }
  SI_ASSIGN_OR_RETURN(const cl_mem buffer, buffers_.take(bytes));
  return Place{buffer, 0, true};
}

Status JobRun::bring(What what, const Place& place, const std::byte* host, uint64_t first,
                     uint64_t bytes) {
  if (!place.copied || bytes == 0) return Status();
  if (device_.options.traffic != nullptr) device_.options.traffic->down[what] += bytes;
  cl_event event = nullptr;
  SI_RETURN_IF_ERROR(device_.run("clEnqueueWriteBuffer", [&] {
    return clEnqueueWriteBuffer(device_.in.get(), place.buffer, CL_FALSE, place.at + first, bytes,
                                host + first, 0, nullptr, &event);
  }));
  brought_ = Event(event);
  return Status();
}

Status JobRun::fetch(What what, const Place& place, std::byte* host, uint64_t first,
                     uint64_t bytes) {
  if (bytes == 0) return Status();
  std::vector<cl_event> after;
  for (const Event& kernel : kernels_) after.push_back(kernel.get());
  cl_event event = nullptr;
  if (place.copied) {
    if (device_.options.traffic != nullptr) device_.options.traffic->up[what] += bytes;
    SI_RETURN_IF_ERROR(device_.run("clEnqueueReadBuffer", [&] {
      return clEnqueueReadBuffer(device_.out.get(), place.buffer, CL_FALSE, place.at + first, bytes,
                                 host + first, static_cast<cl_uint>(after.size()), after.data(),
                                 &event);
    }));
  } else if (device_.memory == OpenClMemory::kShared) {
    cl_int error = CL_SUCCESS;
    SI_RETURN_IF_ERROR(device_.run("clEnqueueMapBuffer", [&] {
      void* mapped = clEnqueueMapBuffer(device_.out.get(), place.buffer, CL_FALSE, CL_MAP_READ,
                                        place.at + first, bytes, static_cast<cl_uint>(after.size()),
                                        after.data(), &event, &error);
      if (error != CL_SUCCESS) return error;
      // Nothing is read through it but by the addresses that it stands for.
      return clEnqueueUnmapMemObject(device_.out.get(), place.buffer, mapped, 0, nullptr, nullptr);
    }));
  } else {
    return Status();  // the drive reads it where it is
  }
  last_ = Event(event);
  return Status();
}

Status JobRun::launch(cl_kernel kernel, uint64_t groups) {
  const size_t global = groups;
  constexpr size_t local = 1;
  const cl_event brought = brought_.get();
  cl_event event = nullptr;
  SI_RETURN_IF_ERROR(device_.run("clEnqueueNDRangeKernel", [&] {
    return clEnqueueNDRangeKernel(device_.compute.get(), kernel, 1, nullptr, &global, &local,
                                  brought != nullptr ? 1 : 0,
                                  brought != nullptr ? &brought : nullptr, &event);
  }));
  kernels_.push_back(Event(event));
  return Status();
}

template <typename... Arguments>
Status JobRun::set_arguments(cl_kernel kernel, const Arguments&... arguments) {
  cl_uint index = 0;
  return device_.run("clSetKernelArg", [&] {
    cl_int error = CL_SUCCESS;
    ((error = error != CL_SUCCESS ? error
                                  : clSetKernelArg(kernel, index++, sizeof(arguments), &arguments)),
     ...);
    return error;
  });
}

template <typename T>
uint64_t JobRun::append(const std::vector<T>& entries) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
  const uint64_t at = tables_.size();
  tables_.resize(at + entries.size() * sizeof(T) / sizeof(uint64_t));
  if (!entries.empty()) {
    std::memcpy(tables_.data() + at, entries.data(), entries.size() * sizeof(T));
  }
  return at * sizeof(uint64_t);
}

base::Result<Place> JobRun::tables() {
  const auto bytes = std::as_bytes(std::span(tables_));
  SI_ASSIGN_OR_RETURN(const Place found, place(bytes.data(), bytes.size()));
  SI_RETURN_IF_ERROR(bring(OpenClTraffic::kTables, found, bytes.data(), 0, bytes.size()));
  SI_ASSIGN_OR_RETURN(sums_place_, place(bytes_at(static_cast<const void*>(sums_.data())),
                                         sums_.size() * sizeof(uint64_t)));
  return found;
}

Status JobRun::fetch_sums() {
  return fetch(OpenClTraffic::kTables, sums_place_, bytes_at(static_cast<void*>(sums_.data())), 0,
               sums_.size() * sizeof(uint64_t));
}

void JobRun::append_update_tables(const UpdateJob& job, UpdateArguments& arguments) {
  const PlaneBlocks& planes = job.planes;
  const storage::StoredSubgroup& subgroup = planes.subgroup();
  const uint64_t end = subgroup.first_element + subgroup.count;
  std::vector<SpanEntry> spans;
  for (const plan::GroupSpan& group : job.groups) {
    if (group.first + group.count <= subgroup.first_element) continue;
    if (group.first >= end) break;
    spans.push_back(
        {std::min(group.first + group.count, end) - subgroup.first_element, group.group});
  }
  if (job.groups.empty()) spans.push_back({subgroup.count, 0});
  arguments.spans_at = append(spans);
  std::vector<kernels::RuleScalars> scalars;
  for (const kernels::StepScalars& group : job.scalars) {
    scalars.push_back(kernels::rule_scalars(group));
  }
  arguments.scalars_at = append(scalars);
  std::vector<SumEntry> in(planes.blocks() * kSumsPerBlock);
  std::vector<SumEntry> out(in.size());
  const GradientView& gradient = job.gradient;
  const size_t kept = kernels::rule_planes(job.scalars.front().rule).size();
  for (uint64_t block = 0; block < planes.blocks(); ++block) {
    for (size_t plane = 0; plane < kept; ++plane) {
      in[block * kSumsPerBlock + plane] = expected_entry(planes, plane, block);
      out[block * kSumsPerBlock + plane] = seal_entry(planes, plane, block);
    }
    if (gradient.memory == nullptr) continue;
    in[block * kSumsPerBlock + kPlanesMax] =
        entry_of(gradient.memory->expected_sum(gradient.subgroup, block),
                 planes.elements(block) * base::data_type_bytes(gradient.type));
  }
  arguments.sums_in_at = append(in);
  arguments.sums_out_at = append(out);
}

void JobRun::append_matrices(const UpdateJob& job, UpdateArguments& arguments) {
  const storage::StoredSubgroup& subgroup = job.planes.subgroup();
  const compress::CompressedView& message = job.gradient.compressed;
  std::vector<MatrixEntry> entries;
  uint64_t factors = 0;
  uint64_t run = 0;
  for (const compress::MatrixLayout& matrix :
       compress::matrices_in(job.matrices, subgroup.first_element, subgroup.count)) {
    const compress::MatrixPart part =
        compress::part_of(matrix, subgroup.first_element, subgroup.count);
    entries.push_back({.first = part.first,
                       .end = part.first + part.count,
                       .columns = matrix.columns,
                       .first_column = part.first_column(),
                       .rows_at = factors,
                       .columns_at = factors + part.rows(),
                       .row_scale = message.factor_scale(run),
                       .column_scale = message.factor_scale(run + 1)});
    factors += part.factors();
    run += compress::kFactorRunsPerMatrix;
  }
  arguments.matrices = entries.size();
  arguments.matrices_at = append(entries);
  arguments.factors_at = message.codes_offset();
}

Status JobRun::enqueue(const UpdateJob& job) {
  const PlaneBlocks& planes = job.planes;
  const storage::StoredSubgroup& subgroup = planes.subgroup();
  const kernels::StepScalars& step = job.scalars.front();
  const std::span<const base::PlaneKind> kinds = kernels::rule_planes(step.rule);
  const compress::CompressedView& message = job.gradient.compressed;
  const bool compressed = job.gradient.dense == nullptr;
  const base::DataType type = compressed ? message.type() : job.gradient.type;
  SI_ASSIGN_OR_RETURN(const cl_kernel kernel,
                      programs_.update({step.rule, planes.format(), type, job.weights_type}));

  for (uint64_t block = 0; block < planes.blocks(); ++block) {
    for (size_t plane = 0; plane < kinds.size(); ++plane) {
      SI_RETURN_IF_ERROR(verify_short(planes, plane, block));
    }
    const uint64_t bytes = planes.elements(block) * base::data_type_bytes(type);
    if (job.gradient.memory == nullptr || bytes > kHostSumBytes) continue;
    if (!job.gradient.memory->verify_block(
            job.gradient.subgroup, block,
            {job.gradient.dense + block * kBlockElements * base::data_type_bytes(type), bytes})) {
      return damaged_gradient(planes, block);
    }
  }

  UpdateArguments arguments{};
  arguments.first_element = subgroup.first_element;
  arguments.count = subgroup.count;
  arguments.step_seed = kernels::rounding_seed(step.seed, step.step);
  append_update_tables(job, arguments);
  if (compressed) {
    arguments.compressed = 1;
    arguments.sections_at = message.sections_offset();
    arguments.signs = message.encoding() == compress::ValueEncoding::kSign ? 1 : 0;
    if (message.factors() > 0) {
      if (!kernels::takes_factored_second_moment(step.rule)) return factors_without_variance();
      append_matrices(job, arguments);
    }
  }
  sums_.assign(planes.blocks() * kSumsPerBlock, 0);
  SI_ASSIGN_OR_RETURN(const Place table_place, tables());

  const size_t last = kinds.size() - 1;
  SI_ASSIGN_OR_RETURN(const Place state,
                      place(planes.extent(), planes.offset(last) + planes.plane_bytes(last)));
  for (size_t plane = 0; plane < kinds.size(); ++plane) {
    arguments.plane_at[plane] = state.at + planes.offset(plane);
    SI_RETURN_IF_ERROR(bring(what_of(kinds[plane]), state, planes.extent(), planes.offset(plane),
                             planes.plane_bytes(plane)));
  }
  const std::span<const std::byte> gradient_bytes =
      compressed ? message.bytes()
                 : std::span(job.gradient.dense, subgroup.count * base::data_type_bytes(type));
  SI_ASSIGN_OR_RETURN(const Place gradient, place(gradient_bytes.data(), gradient_bytes.size()));
  SI_RETURN_IF_ERROR(
      bring(OpenClTraffic::kGradient, gradient, gradient_bytes.data(), 0, gradient_bytes.size()));
  arguments.gradient_at = gradient.at;
  Place weights{sums_place_.buffer, 0, false};  // any buffer: it is not touched
  const uint64_t weights_bytes = subgroup.count * base::data_type_bytes(job.weights_type);
  if (job.weights_out != nullptr) {
    SI_ASSIGN_OR_RETURN(weights, place(bytes_at(job.weights_out), weights_bytes));
    arguments.has_weights = 1;
    arguments.weights_at = weights.at;
  }
  uint64_t groups = planes.blocks();
  cl_mem scratch = sums_place_.buffer;
  if (compressed) {  // a group expands a block into memory of its own
    groups = std::min<uint64_t>(groups, uint64_t{4} * device_.compute_units);
    SI_ASSIGN_OR_RETURN(scratch,
                        buffers_.take(groups * kBlockElements * base::data_type_bytes(type)));
  }
  SI_RETURN_IF_ERROR(set_arguments(kernel, arguments, state.buffer, gradient.buffer, weights.buffer,
                                   table_place.buffer, sums_place_.buffer, scratch));
  SI_RETURN_IF_ERROR(launch(kernel, groups));

  if (job.weights_out != nullptr) {
    SI_RETURN_IF_ERROR(
        fetch(OpenClTraffic::kWeights, weights, bytes_at(job.weights_out), 0, weights_bytes));
  }
  for (size_t plane = 0; plane < kinds.size(); ++plane) {
    SI_RETURN_IF_ERROR(fetch(what_of(kinds[plane]), state, planes.extent(), planes.offset(plane),
                             planes.plane_bytes(plane)));
  }
  return fetch_sums();
}

Status JobRun::finish(const UpdateJob& job) {
  const PlaneBlocks& planes = job.planes;
  const size_t kept = kernels::rule_planes(job.scalars.front().rule).size();
  for (uint64_t block = 0; block < planes.blocks(); ++block) {
    const uint64_t bad = sums_[block * kSumsPerBlock + kPlanesMax];
    if (bad == 0) continue;
    const auto which = static_cast<size_t>(std::countr_zero(bad));
    return which < kept ? damaged(planes, which, block) : damaged_gradient(planes, block);
  }
  for (uint64_t block = 0; block < planes.blocks(); ++block) {
    for (size_t plane = 0; plane < kept; ++plane) {
      seal(planes, plane, block, sums_[block * kSumsPerBlock + plane]);
    }
  }
  if (job.samples_out != nullptr) take_samples(job);
  return Status();
}

Status JobRun::launch_plane(cl_kernel kernel, PlaneArguments arguments, const Place& state,
                            const Place& values, const Place& table_place, uint64_t sums_at) {
  arguments.plane_at += state.at;
  arguments.values_at = values.at;
  arguments.results_at = sums_at;
  SI_RETURN_IF_ERROR(set_arguments(kernel, arguments, state.buffer, values.buffer,
                                   table_place.buffer, sums_place_.buffer));
  return launch(kernel, arguments.blocks);
}

namespace {

PlaneArguments arguments_of(const PlaneBlocks& planes, size_t plane) {
  PlaneArguments arguments{};
  arguments.plane_at = planes.offset(plane);
  arguments.encoding = static_cast<uint64_t>(planes.encoding(plane));
  arguments.kind = static_cast<uint64_t>(planes.planes()[plane]);
  arguments.blocks = planes.blocks();
  arguments.count = planes.subgroup().count;
  arguments.wanted = arguments.count;
  arguments.first_element = planes.subgroup().first_element;
  return arguments;
}

}  // namespace

Status JobRun::enqueue(const DecodeJob& job) {
  const ReadState& read = *job.read;
  SI_ASSIGN_OR_RETURN(const PlaneKernels* kernels, programs_.planes());
  const uint64_t first_block = read.first / kBlockElements;
  const uint64_t blocks = base::divide_up(read.count, kBlockElements);
  const size_t count = job.planes.planes().size();
  std::vector<SumEntry> entries(count * blocks);
  for (size_t plane = 0; plane < count; ++plane) {
    if (read.planes[plane] == nullptr) continue;
    const PlaneBlocks& from = source_of(job, plane);
    for (uint64_t i = 0; i < blocks; ++i) {
      SI_RETURN_IF_ERROR(verify_short(from, plane, first_block + i));
      entries[plane * blocks + i] = expected_entry(from, plane, first_block + i);
    }
  }
  append(entries);
  sums_.assign(entries.size(), 0);
  SI_ASSIGN_OR_RETURN(const Place table_place, tables());
  std::array<std::optional<Place>, 2> states;  // of the slot and of the state cache
  for (size_t plane = 0; plane < count; ++plane) {
    if (read.planes[plane] == nullptr) continue;
    const PlaneBlocks& from = source_of(job, plane);
    std::optional<Place>& state = states[&from == &job.cached ? 1 : 0];
    if (!state) {
      const size_t last = last_plane(from, job);
      SI_ASSIGN_OR_RETURN(state, place(from.extent(), from.offset(last) + from.plane_bytes(last)));
    }
    PlaneArguments arguments = arguments_of(from, plane);
    arguments.first_block = first_block;
    arguments.blocks = blocks;
    arguments.wanted = read.count;
    arguments.sums_at = plane * blocks * sizeof(SumEntry);
    const std::byte* first = from.bytes(plane, first_block).data();
    const std::span<std::byte> last_block = from.bytes(plane, first_block + blocks - 1);
    SI_RETURN_IF_ERROR(bring(what_of(from.planes()[plane]), *state, from.extent(),
                             static_cast<uint64_t>(first - from.extent()),
                             static_cast<uint64_t>(last_block.data() + last_block.size() - first)));
    SI_ASSIGN_OR_RETURN(const Place values, place(bytes_at(static_cast<void*>(read.planes[plane])),
                                                  read.count * sizeof(float)));
    SI_RETURN_IF_ERROR(launch_plane(kernels->decode.get(), arguments, *state, values, table_place,
                                    plane * blocks));
    SI_RETURN_IF_ERROR(fetch(OpenClTraffic::kValues, values,
                             bytes_at(static_cast<void*>(read.planes[plane])), 0,
                             read.count * sizeof(float)));
  }
  return fetch_sums();
}

Status JobRun::finish(const DecodeJob& job) {
  const uint64_t first_block = job.read->first / kBlockElements;
  const uint64_t blocks = base::divide_up(job.read->count, kBlockElements);
  for (size_t i = 0; i < sums_.size(); ++i) {
    // Planes that nobody asked for were not computed.
    if (job.read->planes[i / blocks] == nullptr || sums_[i] == 0) continue;
    return damaged(source_of(job, i / blocks), i / blocks, first_block + i % blocks);
  }
  return Status();
}

Status JobRun::enqueue(const EncodeJob& job) {
  const WriteState& write = *job.write;
  const PlaneBlocks& planes = job.planes;
  SI_ASSIGN_OR_RETURN(const PlaneKernels* kernels, programs_.planes());
  const uint64_t blocks = planes.blocks();
  const size_t count = planes.planes().size();
  std::vector<SumEntry> entries(count * blocks);
  for (size_t plane = 0; plane < count; ++plane) {
    if ((write.plane_mask >> plane & 1u) == 0) continue;
    for (uint64_t block = 0; block < blocks; ++block) {
      entries[plane * blocks + block] = seal_entry(planes, plane, block);
    }
  }
  append(entries);
  sums_.assign(entries.size(), 0);
  SI_ASSIGN_OR_RETURN(const Place table_place, tables());
  const size_t last = count - 1;
  SI_ASSIGN_OR_RETURN(const Place state,
                      place(planes.extent(), planes.offset(last) + planes.plane_bytes(last)));
  for (size_t plane = 0; plane < count; ++plane) {
    if ((write.plane_mask >> plane & 1u) == 0) continue;
    PlaneArguments arguments = arguments_of(planes, plane);
    arguments.sums_at = plane * blocks * sizeof(SumEntry);
    const OpenClTraffic::What what = what_of(planes.planes()[plane]);
    const bool residual =
        planes.planes()[plane] == base::PlaneKind::kResidual && write.residual != nullptr;
    const std::byte* in = residual ? bytes_at(static_cast<const void*>(write.residual))
                                   : bytes_at(static_cast<const void*>(write.planes[plane]));
    const uint64_t in_bytes = arguments.count * (residual ? sizeof(base::Bf16) : sizeof(float));
    if (residual) arguments.type = static_cast<uint64_t>(base::DataType::kBf16);
    Place values{sums_place_.buffer, 0, false};
    if (in == nullptr) {
      arguments.zeros = 1;
    } else {
      SI_ASSIGN_OR_RETURN(values, place(in, in_bytes));
      SI_RETURN_IF_ERROR(bring(OpenClTraffic::kValues, values, in, 0, in_bytes));
    }
    SI_RETURN_IF_ERROR(
        launch_plane(kernels->encode.get(), arguments, state, values, table_place, plane * blocks));
    SI_RETURN_IF_ERROR(
        fetch(what, state, planes.extent(), planes.offset(plane), planes.plane_bytes(plane)));
  }
  return fetch_sums();
}

Status JobRun::finish(const EncodeJob& job) {
  const uint64_t blocks = job.planes.blocks();
  for (size_t i = 0; i < sums_.size(); ++i) {
    if ((job.write->plane_mask >> (i / blocks) & 1u) == 0) continue;
    seal(job.planes, i / blocks, i % blocks, sums_[i]);
  }
  return Status();
}

Status JobRun::enqueue(const CastJob& job) {
  constexpr size_t kMaster = 0;
  const PlaneBlocks& planes = job.planes;
  SI_ASSIGN_OR_RETURN(const PlaneKernels* kernels, programs_.planes());
  std::vector<SumEntry> entries;
  for (uint64_t block = 0; block < planes.blocks(); ++block) {
    SI_RETURN_IF_ERROR(verify_short(planes, kMaster, block));
    entries.push_back(expected_entry(planes, kMaster, block));
  }
  append(entries);
  sums_.assign(entries.size(), 0);
  SI_ASSIGN_OR_RETURN(const Place table_place, tables());
  PlaneArguments arguments = arguments_of(planes, kMaster);
  arguments.type = static_cast<uint64_t>(job.type);
  SI_ASSIGN_OR_RETURN(const Place state, place(planes.extent(), planes.plane_bytes(kMaster)));
  SI_RETURN_IF_ERROR(
      bring(OpenClTraffic::kMaster, state, planes.extent(), 0, planes.plane_bytes(kMaster)));
  const uint64_t bytes = arguments.count * base::data_type_bytes(job.type);
  SI_ASSIGN_OR_RETURN(const Place weights, place(bytes_at(job.weights_out), bytes));
  SI_RETURN_IF_ERROR(launch_plane(kernels->cast.get(), arguments, state, weights, table_place, 0));
  SI_RETURN_IF_ERROR(fetch(OpenClTraffic::kWeights, weights, bytes_at(job.weights_out), 0, bytes));
  return fetch_sums();
}

Status JobRun::finish(const CastJob& job) {
  for (uint64_t block = 0; block < sums_.size(); ++block) {
    if (sums_[block] != 0) return damaged(job.planes, 0, block);
  }
  return Status();
}

Status JobRun::begin(Job& job) {
  job_ = &job;
  tables_.clear();
  Status status = std::visit([this](const auto& work) { return enqueue(work); }, job.work);
  const auto flush = [&](const Queue& queue) {
    if (status.ok()) status = device_.run("clFlush", [&] { return clFlush(queue.get()); });
  };
  flush(device_.in);
  flush(device_.compute);
  flush(device_.out);
  if (status.ok()) return status;
  // Enqueued work may still use the job's memory.
  for (const Queue* queue : {&device_.in, &device_.compute, &device_.out}) clFinish(queue->get());
  brought_ = Event();
  kernels_.clear();
  last_ = Event();
  buffers_.release();
  return status;
}

Status JobRun::end(bool done) {
  brought_ = Event();
  kernels_.clear();
  last_ = Event();
  buffers_.release();
  if (!done) return Status();
  return std::visit([this](const auto& work) { return finish(work); }, job_->work);
}

}  // namespace smartinf::csd::opencl
