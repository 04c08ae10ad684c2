#include "smartinf/engine/ranks/gradient_exchange.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/update.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Status;
using Piece = GradientTracker::Piece;

namespace {

static_assert(plan::kRankPieceElements == kGradientPieceElements);

/// Elements that are added up at once, in a core's cache.
constexpr uint64_t kChunkElements = 4096;

std::vector<uint32_t> measuring_ranks(const GradientTracker& tracker,
                                      const GradientLayout& layout) {
  std::vector<uint32_t> ranks;
  for (const Piece& piece : tracker.all_pieces())
    ranks.push_back(layout.measuring_rank(piece.first));
  return ranks;
}

}  // namespace

GradientExchange::GradientExchange(std::shared_ptr<Collectives> ranks, DeviceUpdater& updater,
                                   const std::vector<uint32_t>& rank_of,
                                   base::TrafficCounter& traffic, CompressedSums* compressed,
                                   uint32_t compressed_stages)
    : ranks_(std::move(ranks)),
      updater_(updater),
      layout_(updater.devices(), rank_of),
      bucket_bytes_(plan::rank_bucket_bytes(updater.space().count())),
      measured_by_(measuring_ranks(updater.gradient_tracker(), layout_)),
      traffic_(traffic),
      compressed_(compressed),
      compressed_stages_(compressed_stages),
      formats_(ranks_->world()),
      open_received_(ranks_->world(), 0),
      stacks_(updater.team().size()),
      worker_("si-gradients", [this](Bucket* bucket) { work(*bucket); }) {
  sums_.resize(plan::rank_sum_elements(updater.space().count()));
  for (Bucket& bucket : buckets_) free_.push_back(&bucket);
}

// ---- The caller.

Status GradientExchange::check(const GradientSums& sums, const std::vector<Holders>& holders) {
  const uint32_t rank = ranks_->rank();
  const size_t nodes = sums.micro_batches == 0
                           ? 0
                           : formats_.of(sums.micro_batches, sums.type, holders).nodes_of(rank);
  if (sums.micro_batches > 0 && nodes == sums.nodes.size()) return Status();
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("rank {} gave {} sums of a gradient over {} micro batches; it has {}",
                            rank, sums.nodes.size(), sums.micro_batches, nodes),
                "This is a bug in the caller.");
}

void GradientExchange::put(std::span<const Piece> pieces, uint64_t first, const GradientSums& sums,
                           const std::vector<Holders>& holders) {
  const SumFormat& format = formats_.of(sums.micro_batches, sums.type, holders);
  for (const uint64_t part : {first, uint64_t{pieces.size()}, sums.micro_batches,
                              uint64_t{sums.trees}, static_cast<uint64_t>(sums.type)}) {
    spans_checksum_ = base::mix_seed(spans_checksum_, part);
  }
  std::vector<Received> home;
  for (const Piece& piece : pieces) {
    std::vector<const std::byte*> nodes;
    size_t next = 0;
    for (const SumFormat::Node& node : format.nodes) {
      if (node.rank != ranks_->rank()) continue;
      nodes.push_back(static_cast<const std::byte*>(sums.nodes[next++]) +
                      (piece.first - first) * base::data_type_bytes(node.type));
    }
    if (format.only == ranks_->rank()) {
      layout_.visit_parts(piece, [&](uint32_t rank, const GradientPart& part) {
        if (rank != ranks_->rank()) return;
        Received& received = home.emplace_back(Received{part, &format, nodes, {}});
        for (size_t n = 0; n < nodes.size(); ++n) {
          received.nodes[n] +=
              (part.first - piece.first) * base::data_type_bytes(format.nodes[n].type);
        }
      });
    }
    bool is_sent = false;
    visit_sent(piece, format, [&](uint32_t, const GradientPart&) { is_sent = true; });
    if (is_sent) add({piece, &format, std::move(nodes), {}});
  }
  keep_values();
  put_home(home);
}

void GradientExchange::put_home(std::span<const Received> parts) {
  if (parts.empty()) return;
  Status status = submit_all(parts);
  const std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = std::move(status);
}

/// All ranks close a bucket at the same piece: what they go by is the same on all of them.
void GradientExchange::add(Segment segment) {
  uint64_t elements = 0;
  std::vector<uint64_t> received(ranks_->world(), 0);
  visit_sent(segment.piece, *segment.format, [&](uint32_t rank, const GradientPart& part) {
    elements += part.count;
    received[rank] += part.count * segment.format->bytes_of_all;
  });
  const uint64_t sent = elements * segment.format->bytes_max;
  bool full = open_sent_ + sent > bucket_bytes_;
  for (size_t rank = 0; rank < received.size(); ++rank) {
    full = full || open_received_[rank] + received[rank] > 2 * bucket_bytes_;
  }
  if (full && !open_.empty()) close_bucket();
  open_sent_ += sent;
  for (size_t rank = 0; rank < received.size(); ++rank) open_received_[rank] += received[rank];
  if (compresses(segment.piece, *segment.format)) compress(segment);
  open_.push_back(std::move(segment));
}

bool GradientExchange::compresses(const Piece& piece, const SumFormat& format) const {
  return compressed_ != nullptr && format.replicated && format.last_stage < compressed_stages_ &&
         compressed_->pays(piece.count);
}

uint64_t GradientExchange::part_bytes(uint32_t rank, const Piece& piece, const SumFormat& format,
                                      uint64_t count) const {
  if (!compresses(piece, format)) return format.part_bytes(rank, count);
  return format.bytes[rank] == 0 ? 0 : compressed_->bytes(piece.count);
}

void GradientExchange::compress(Segment& segment) {
  const Piece& piece = segment.piece;
  segment.kept_at = kept_.size();
  if (segment.nodes.empty()) return;
  sum_.assign(piece.count, 0.0f);
  size_t next = 0;
  for (const SumFormat::Node& node : segment.format->nodes) {
    if (node.rank != ranks_->rank()) continue;
    const std::byte* values = segment.nodes[next++];
    for (uint64_t done = 0; done < piece.count; done += kChunkElements) {
      std::array<float, kChunkElements> wide;
      const uint64_t count = std::min(kChunkElements, piece.count - done);
      kernels::kernels().cast_to_f32(values + done * base::data_type_bytes(node.type), node.type,
                                     wide.data(), count);
      for (uint64_t i = 0; i < count; ++i) sum_[done + i] += wide[i];
    }
  }
  kept_.resize(*segment.kept_at + compressed_->bytes(piece.count));
  compressed_->compress(piece, sum_, kept_.data() + *segment.kept_at);
}

/// The caller's memory is free after put().
void GradientExchange::keep_values() {
  for (Segment& segment : open_) {
    if (segment.kept_at.has_value()) continue;
    const uint64_t count = segment.piece.count;
    size_t at = kept_.size();
    segment.kept_at = at;
    kept_.resize(at + segment.format->part_bytes(ranks_->rank(), count));
    size_t next = 0;
    for (const SumFormat::Node& node : segment.format->nodes) {
      if (node.rank != ranks_->rank()) continue;
      std::memcpy(kept_.data() + at, segment.nodes[next++],
                  count * base::data_type_bytes(node.type));
      at += SumFormat::array_bytes(node.type, count);
    }
  }
}

void GradientExchange::close_bucket() {
  Bucket* bucket = nullptr;
  bool dead = false;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !free_.empty(); });
    bucket = free_.back();
    dead = !call_status_.ok();
    if (!dead) free_.pop_back();
  }
  if (!dead) {
    lay_out(*bucket);
    fill(*bucket);
    const uint64_t sent = bucket->own_at;
    auto pending = ranks_->all_to_all(Channel::kGradients, std::span(bucket->send).first(sent),
                                      bucket->send_bytes, bucket->receive, bucket->receive_bytes);
    const std::lock_guard lock(mutex_);
    if (pending.ok()) {
      traffic_.add_down(base::TrafficKind::kGradient, sent);
      traffic_.add_up(base::TrafficKind::kGradient, bucket->receive.size());
      bucket->pending = std::move(*pending);
      worker_.post(bucket);
    } else {
      call_status_ = std::move(pending).status();
      free_.push_back(bucket);
    }
  }
  changed_.notify_all();
  open_.clear();
  kept_.clear();
  open_sent_ = 0;
  open_received_.assign(open_received_.size(), 0);
}

/// Lays out what goes to each rank, and what comes from each.
void GradientExchange::lay_out(Bucket& bucket) {
  const uint32_t here = ranks_->rank();
  bucket.pieces.clear();
  bucket.send_bytes.assign(ranks_->world(), 0);
  bucket.receive_bytes.assign(ranks_->world(), 0);
  for (const Segment& segment : open_) {
    bucket.pieces.emplace_back(segment.piece, segment.format);
    visit_sent(segment.piece, *segment.format, [&](uint32_t rank, const GradientPart& part) {
      const auto bytes = [&](uint32_t from) {
        return part_bytes(from, segment.piece, *segment.format, part.count);
      };
      bucket.send_bytes[rank] += bytes(here);
      if (rank != here) return;
      for (uint32_t from = 0; from < ranks_->world(); ++from) {
        bucket.receive_bytes[from] += bytes(from);
      }
    });
  }
  const uint64_t own = std::exchange(bucket.send_bytes[here], 0);
  bucket.receive_bytes[here] = 0;
  bucket.own_at = 0;
  uint64_t received = 0;
  for (const uint64_t bytes : bucket.send_bytes) bucket.own_at += bytes;
  for (const uint64_t bytes : bucket.receive_bytes) received += bytes;
  bucket.send.resize(bucket.own_at + own);
  bucket.receive.resize(received);
}

void GradientExchange::fill(Bucket& bucket) {
  std::vector<uint64_t> at(ranks_->world(), 0);  // in bucket.send
  for (uint32_t rank = 1; rank < at.size(); ++rank) {
    at[rank] = at[rank - 1] + bucket.send_bytes[rank - 1];
  }
  at[ranks_->rank()] = bucket.own_at;
  for (const Segment& segment : open_) {
    visit_sent(segment.piece, *segment.format, [&](uint32_t rank, const GradientPart& part) {
      if (compresses(segment.piece, *segment.format)) {
        const uint64_t bytes =
            part_bytes(ranks_->rank(), segment.piece, *segment.format, part.count);
        std::copy_n(kept_.data() + *segment.kept_at, bytes, bucket.send.data() + at[rank]);
        at[rank] += bytes;
        return;
      }
      const uint64_t within = part.first - segment.piece.first;
      size_t next = 0;
      size_t kept_at = segment.kept_at.value_or(0);
      for (const SumFormat::Node& node : segment.format->nodes) {
        if (node.rank != ranks_->rank()) continue;
        const std::byte* values = segment.kept_at ? kept_.data() + kept_at : segment.nodes[next];
        const uint64_t bytes = base::data_type_bytes(node.type);
        std::memcpy(bucket.send.data() + at[rank], values + within * bytes, part.count * bytes);
        at[rank] += SumFormat::array_bytes(node.type, part.count);
        kept_at += SumFormat::array_bytes(node.type, segment.piece.count);
        ++next;
      }
    });
  }
}

Status GradientExchange::finish() {
  if (!open_.empty()) close_bucket();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return free_.size() == buckets_.size(); });
  return call_status_.ok() ? status_ : call_status_;
}

void GradientExchange::drop() {
  open_.clear();
  kept_.clear();
  open_sent_ = 0;
  open_received_.assign(open_received_.size(), 0);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return free_.size() == buckets_.size(); });
  status_ = Status();
  spans_checksum_ = 0;
}

Status GradientExchange::share_norms() {
  struct Norm {
    double sum_of_squares = 0;
    uint64_t finite = 1;
  };
  GradientTracker& tracker = updater_.gradient_tracker();
  std::vector<size_t> counts(ranks_->world(), 0);
  for (const uint32_t rank : measured_by_) ++counts[rank];
  const size_t most = *std::max_element(counts.begin(), counts.end());
  std::vector<Norm> mine;
  for (size_t piece = 0; piece < measured_by_.size(); ++piece) {
    if (measured_by_[piece] != ranks_->rank()) continue;
    const GradientTracker::Measured& measured = tracker.measured(piece);
    mine.push_back({measured.sum_of_squares, uint64_t{measured.finite}});
  }
  mine.resize(most);
  std::vector<Norm> all(most * ranks_->world());
  SI_RETURN_IF_ERROR(all_gather(*ranks_, Channel::kGradients, std::as_bytes(std::span(mine)),
                                std::as_writable_bytes(std::span(all))));
  std::vector<size_t> next(ranks_->world(), 0);
  for (size_t piece = 0; piece < measured_by_.size(); ++piece) {
    const uint32_t rank = measured_by_[piece];
    const Norm& norm = all[rank * most + next[rank]++];
    tracker.set_measured(piece, {norm.sum_of_squares, norm.finite != 0});
  }
  return Status();
}

// ---- The thread.

void GradientExchange::work(Bucket& bucket) {
  Status waited = bucket.pending->wait();
  bucket.pending.reset();
  bool useful = false;
  {
    const std::lock_guard lock(mutex_);
    if (!waited.ok() && call_status_.ok()) call_status_ = std::move(waited);
    // After a failure the other ranks are still sent what they need.
    useful = call_status_.ok() && status_.ok();
  }
  Status received = useful ? receive(bucket) : Status();
  {
    const std::lock_guard lock(mutex_);
    if (status_.ok()) status_ = std::move(received);
    free_.push_back(&bucket);
  }
  changed_.notify_all();
}

std::vector<GradientExchange::Received> GradientExchange::received_in(const Bucket& bucket) const {
  const uint32_t here = ranks_->rank();
  std::vector<const std::byte*> at;  // of each rank, what comes next
  const std::byte* next = bucket.receive.data();
  for (const uint64_t bytes : bucket.receive_bytes) {
    at.push_back(next);
    next += bytes;
  }
  at[here] = bucket.send.data() + bucket.own_at;
  std::vector<Received> parts;
  for (const auto& [piece, format] : bucket.pieces) {
    visit_sent(piece, *format, [&, format = format](uint32_t rank, const GradientPart& part) {
      if (rank != here) return;
      Received& received = parts.emplace_back(Received{part, format, {}, {}});
      if (compresses(piece, *format)) {
        received.compressed = piece;
        for (uint32_t from = 0; from < ranks_->world(); ++from) {
          const uint64_t bytes = part_bytes(from, piece, *format, part.count);
          if (bytes > 0) received.nodes.push_back(at[from]);
          at[from] += bytes;
        }
        return;
      }
      for (const SumFormat::Node& node : format->nodes) {
        received.nodes.push_back(at[node.rank]);
        at[node.rank] += SumFormat::array_bytes(node.type, part.count);
      }
    });
  }
  return parts;
}

Status GradientExchange::receive(Bucket& bucket) { return submit_all(received_in(bucket)); }

Status GradientExchange::submit_all(std::span<const Received> parts) {
  const std::lock_guard lock(submitting_);
  for (size_t begin = 0; begin < parts.size();) {
    size_t end = begin;
    uint64_t elements = 0;
    do {
      elements += parts[end].part.count;
      ++end;
    } while (end < parts.size() && elements < plan::kRankSumElements &&
             parts[end].part.first == parts[end - 1].part.first + parts[end - 1].part.count);
    SI_RETURN_IF_ERROR(submit(std::span(parts).subspan(begin, end - begin)));
    begin = end;
  }
  return Status();
}

/// Parts that follow each other.
Status GradientExchange::submit(std::span<const Received> run) {
  const uint64_t first = run.front().part.first;
  std::vector<Status> added(run.size());
  updater_.team().run(run.size(), [&](uint32_t worker, size_t index) {
    const Received& received = run[index];
    float* out = sums_.data() + (received.part.first - first);
    if (received.compressed) added[index] = add_messages(received, out, stacks_[worker]);
    if (!received.compressed) add_up(received, out, stacks_[worker]);
  });
  for (const Status& one : added) SI_RETURN_IF_ERROR(one);
  std::vector<GradientPart> parts;
  for (const Received& received : run) parts.push_back(received.part);
  return updater_.put_pieces(parts, first, sums_.data(), base::DataType::kF32);
}

/// In the order of the ranks.
Status GradientExchange::add_messages(const Received& received, float* out,
                                      std::vector<float>& scratch) const {
  const std::span<float> sums(out, received.part.count);
  std::ranges::fill(sums, 0.0f);
  const uint64_t from = received.part.first - received.compressed->first;
  for (const std::byte* message : received.nodes) {
    SI_RETURN_IF_ERROR(compressed_->add(*received.compressed, message, from, sums, scratch));
  }
  return Status();
}

/// The lowest sum of the stack is `out` itself.
void GradientExchange::add_up(const Received& received, float* out,
                              std::vector<float>& stack) const {
  const std::vector<SumFormat::Node>& nodes = received.format->nodes;
  stack.resize(std::max(stack.size(), (received.format->stack_max - 1) * kChunkElements));
  for (uint64_t done = 0; done < received.part.count; done += kChunkElements) {
    const uint64_t count = std::min(kChunkElements, received.part.count - done);
    const auto sum = [&](size_t height) {
      return height == 0 ? out + done : stack.data() + (height - 1) * kChunkElements;
    };
    size_t height = 0;
    for (size_t n = 0; n < nodes.size(); ++n) {
      const std::byte* values = received.nodes[n] + done * base::data_type_bytes(nodes[n].type);
      kernels::kernels().cast_to_f32(values, nodes[n].type, sum(height++), count);
      for (uint32_t added = 0; added < nodes[n].added; ++added, --height) {
        float* into = sum(height - 2);
        const float* from = sum(height - 1);
        for (uint64_t i = 0; i < count; ++i) into[i] += from[i];
      }
    }
  }
}

}  // namespace smartinf::engine
