#include "smartinf/csd/opencl/folder.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/arithmetic.h"
#include "smartinf/csd/opencl/job.h"
#include "smartinf/csd/opencl/memory.h"
#include "smartinf/csd/opencl/programs.h"
#include "smartinf/kernels/update.h"

namespace smartinf::csd::opencl {
namespace {

using base::Status;

class OpenClFolder final : public Folder {
 public:
  OpenClFolder(std::shared_ptr<Device> device, const kernels::AttentionShape& shape)
      : device_(std::move(device)), shape_(shape), buffers_(*device_) {}

  Status open() {
    SI_ASSIGN_OR_RETURN(kernel_, Programs(*device_).fold());
    SI_ASSIGN_OR_RETURN(queue_, device_->make<Queue>("clCreateCommandQueue", [&](cl_int* error) {
      return clCreateCommandQueue(device_->context.get(), device_->id, 0, error);
    }));
    return test();
  }

  Status fold(const FoldJob& job) override {
    Status folded = run(job);
    // What was begun may still use this machine's memory.
    if (!folded.ok()) (void)clFinish(queue_.get());
    buffers_.release();
    return folded;
  }

 private:
  Status run(const FoldJob& job) {
    const uint64_t width = shape_.block.head_width;
    const uint64_t query_floats = shape_.heads * width;
    queries_.clear();
    states_.clear();
    first_tokens_.clear();
    for (const FoldFrom& one : job.queries) {
      queries_.insert(queries_.end(), one.query.query, one.query.query + query_floats);
      states_.insert(states_.end(), one.query.state, one.query.state + shape_.state_floats());
      first_tokens_.push_back(one.first_token);
    }
    FoldArguments arguments{};
    arguments.first_block = job.first_block;
    arguments.block_bytes = kernels::cache_block_bytes(shape_.block);
    arguments.blocks = job.blocks.size() / arguments.block_bytes;
    arguments.end_token = job.end_token;
    arguments.heads = shape_.heads;
    arguments.group = shape_.queries_per_head();
    arguments.head_width = width;
    arguments.format = static_cast<uint64_t>(shape_.block.format);
    arguments.scale = shape_.scale;
    arguments.softcap = shape_.softcap;
    // The device reads only.
    auto* blocks = const_cast<std::byte*>(job.blocks.data());
    cl_mem blocks_there = nullptr;
    if (device_->memory == OpenClMemory::kShared) {
      SI_ASSIGN_OR_RETURN(blocks_there, buffers_.borrow(blocks, job.blocks.size()));
    } else {
      SI_ASSIGN_OR_RETURN(blocks_there, put(blocks, job.blocks.size()));
    }
    SI_ASSIGN_OR_RETURN(const cl_mem queries,
                        put(queries_.data(), queries_.size() * sizeof(float)));
    const uint64_t state_bytes = states_.size() * sizeof(float);
    SI_ASSIGN_OR_RETURN(const cl_mem states, put(states_.data(), state_bytes));
    SI_ASSIGN_OR_RETURN(const cl_mem first_tokens,
                        put(first_tokens_.data(), first_tokens_.size() * sizeof(uint64_t)));
    cl_uint index = 0;
    clSetKernelArg(kernel_.get(), index++, sizeof(arguments), &arguments);
    for (const cl_mem& buffer : {blocks_there, queries, states, first_tokens}) {
      clSetKernelArg(kernel_.get(), index++, sizeof(buffer), &buffer);
    }
    constexpr size_t local = kernels::kCacheBlockTokens;
    const size_t global = job.queries.size() * shape_.heads * local;
    SI_RETURN_IF_ERROR(device_->run("clEnqueueNDRangeKernel", [&] {
      return clEnqueueNDRangeKernel(queue_.get(), kernel_.get(), 1, nullptr, &global, &local, 0,
                                    nullptr, nullptr);
    }));
    SI_RETURN_IF_ERROR(device_->run("clEnqueueReadBuffer", [&] {
      return clEnqueueReadBuffer(queue_.get(), states, CL_TRUE, 0, state_bytes, states_.data(), 0,
                                 nullptr, nullptr);
    }));
    for (size_t i = 0; i < job.queries.size(); ++i) {
      std::copy_n(states_.data() + i * shape_.state_floats(), shape_.state_floats(),
                  job.queries[i].query.state);
    }
    return {};
  }

  /// On the device, in order; `from` stays until fold() ends.
  base::Result<cl_mem> put(const void* from, uint64_t bytes) {
    SI_ASSIGN_OR_RETURN(const cl_mem there, buffers_.take(bytes));
    SI_RETURN_IF_ERROR(device_->run("clEnqueueWriteBuffer", [&] {
      return clEnqueueWriteBuffer(queue_.get(), there, CL_FALSE, 0, bytes, from, 0, nullptr,
                                  nullptr);
    }));
    return there;
  }

  /// Two queries over three blocks, the ends of which they do not see.
  Status test() {
    constexpr uint32_t kTokens = kernels::kCacheBlockTokens;
    constexpr uint64_t kBlocks = 3;
    const uint64_t block_bytes = kernels::cache_block_bytes(shape_.block);
    SI_ASSIGN_OR_RETURN(const base::AlignedBuffer blocks,
                        base::AlignedBuffer::allocate(kBlocks * block_bytes));
    const auto number = [](uint64_t seed, uint64_t i) {
      const auto word = static_cast<int32_t>(base::mix_seed(seed, i));
      return static_cast<float>(word) * 0x1p-29f;
    };
    std::vector<float> rows(uint64_t{2} * kTokens * shape_.block.kv_heads *
                            shape_.block.head_width);
    for (uint64_t b = 0; b < kBlocks; ++b) {
      for (size_t i = 0; i < rows.size(); ++i) rows[i] = number(b, i);
      kernels::append_tokens(shape_.block, blocks.bytes().subspan(b * block_bytes, block_bytes), 0,
                             kTokens, base::DataType::kF32, rows.data(),
                             rows.data() + rows.size() / 2);
    }
    std::vector<float> query(shape_.heads * shape_.block.head_width);
    for (size_t i = 0; i < query.size(); ++i) query[i] = number(7, i);
    std::array<std::vector<float>, 2> found, wanted;
    std::vector<FoldFrom> asked;
    for (size_t q = 0; q < 2; ++q) {
      found[q].resize(shape_.state_floats());
      kernels::begin_fold(shape_, found[q].data());
      wanted[q] = found[q];
      asked.push_back({{query.data(), found[q].data()}, q * (kTokens + 7)});
    }
    constexpr uint64_t kEnd = kBlocks * kTokens - 5;
    for (size_t q = 0; q < 2; ++q) {
      const kernels::FoldQuery one{query.data(), wanted[q].data()};
      for (uint64_t b = 0; b < kBlocks; ++b) {
        kernels::fold_block(*kernels::supported_tables().front(), shape_,
                            blocks.bytes().subspan(b * block_bytes, block_bytes),
                            kernels::range_in_block(b, asked[q].first_token, kEnd), {&one, 1});
      }
    }
    SI_RETURN_IF_ERROR(fold({blocks.bytes(), 0, kEnd, asked}));
    for (size_t q = 0; q < 2; ++q) {
      if (std::memcmp(found[q].data(), wanted[q].data(), found[q].size() * sizeof(float)) == 0) {
        continue;
      }
      return Status(base::ErrorCode::kUnsupported,
                    "the OpenCL device \"" + device_->info.name +
                        "\" computes other bits than smartinf where it attends to keys and values",
                    "Its compiler or its arithmetic does not keep to IEEE 754: use processor = "
                    "\"cpu\", and report this message with the driver's version.");
    }
    return {};
  }

  const std::shared_ptr<Device> device_;
  const kernels::AttentionShape shape_;
  Buffers buffers_;
  Kernel kernel_;
  Queue queue_;
  std::vector<float> queries_, states_;
  std::vector<uint64_t> first_tokens_;
};

}  // namespace

base::Result<std::unique_ptr<Folder>> make_folder(std::shared_ptr<Device> device,
                                                  const kernels::AttentionShape& shape) {
  auto folder = std::make_unique<OpenClFolder>(std::move(device), shape);
  SI_RETURN_IF_ERROR(folder->open());
  return std::unique_ptr<Folder>(std::move(folder));
}

}  // namespace smartinf::csd::opencl
