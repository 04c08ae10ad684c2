#include "apps/smartinf/kernel_timer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/kernels/update.h"

#include "apps/smartinf/median.h"

namespace smartinf::apps {
namespace {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define SI_EVERY_WIDTH __attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default")))
#else
#define SI_EVERY_WIDTH
#endif

/// STREAM's triad (McCalpin 1995): two arrays read, one written.
SI_EVERY_WIDTH void triad(float* __restrict a, const float* __restrict b, const float* __restrict c,
                          float scale, size_t n) {
  for (size_t i = 0; i < n; ++i) a[i] = b[i] + scale * c[i];
}

SI_EVERY_WIDTH uint64_t bits_of_all(const uint64_t* words, size_t n) {
  uint64_t bits = 0;
  for (size_t i = 0; i < n; ++i) bits |= words[i];
  return bits;
}

float* floats(const base::AlignedBuffer& array) { return reinterpret_cast<float*>(array.data()); }

double seconds(base::ThreadTeam& team, const std::function<void(uint32_t)>& work) {
  const uint64_t start_ns = base::now_ns();
  team.run(team.size(), [&](uint32_t, size_t index) { work(static_cast<uint32_t>(index)); });
  return base::seconds_since(start_ns);
}

}  // namespace

double read_seconds(base::ThreadTeam& team, std::span<const std::byte> memory) {
  const auto* const words = reinterpret_cast<const uint64_t*>(memory.data());
  std::atomic<uint64_t> bits{0};  // so that nothing of it can be left out
  return seconds(team, [&](uint32_t index) {
    const Share share = share_of(memory.size() / sizeof(uint64_t), index, team.size());
    bits |= bits_of_all(words + share.first, share.last - share.first);
  });
}

base::Status KernelTimer::allocate(uint64_t bytes_max) {
  for (base::AlignedBuffer& array : triad_) {
    SI_ASSIGN_OR_RETURN(array, base::AlignedBuffer::allocate(bytes_max / 3 + 64));
    std::memset(array.data(), 0, array.size());
  }
  return {};
}

void KernelTimer::begin() const {
  if (json_) {
    fmt::print("[");
  } else {
    fmt::print("{:<14} {:<8} {:<5} {:<5} {:>3}  {:>12} {:>11} {:>11} {:>6}\n", "kernel", "rule",
               "state", "grad", "thr", "Mparams/s", "GB/s", "triad GB/s", "share");
  }
}

void KernelTimer::end() const {
  if (json_) fmt::print("\n]\n");
}

void KernelTimer::time(base::ThreadTeam& team, const Row& row,
                       const std::function<void(uint32_t)>& work,
                       const std::function<void()>& prepare) {
  const uint64_t triad_elements = row.bytes / 12;
  const std::function<void(uint32_t)> run_triad = [&](uint32_t index) {
    const Share share = share_of(triad_elements, index, team.size());
    triad(floats(triad_[0]) + share.first, floats(triad_[1]) + share.first,
          floats(triad_[2]) + share.first, 0.5f, share.last - share.first);
  };
  std::vector<double> kernel_s;
  std::vector<double> triad_s;
  for (int i = 0; i < row.warm_up; ++i) {
    prepare();
    seconds(team, work);
  }
  for (int i = 0; i < repeat_; ++i) {
    triad_s.push_back(seconds(team, run_triad));
    prepare();
    kernel_s.push_back(seconds(team, work));
  }
  print(row, team.size(), kernel_s, static_cast<double>(triad_elements * 12) / median(triad_s));
}

void KernelTimer::print(const Row& row, uint32_t threads, const std::vector<double>& kernel_s,
                        double triad_bytes_per_s) {
  const double seconds = median(kernel_s);
  const double params_per_s = static_cast<double>(elements_) / seconds;
  const double bytes_per_s = static_cast<double>(row.bytes) / seconds;
  if (!json_) {
    const std::string kernel =
        row.share > 0 ? fmt::format("{}-{:g}%", row.kernel, row.share * 100) : row.kernel;
    fmt::print("{:<14} {:<8} {:<5} {:<5} {:>3}  {:>12.1f} {:>11.2f} {:>11.2f} {:>6.2f}\n", kernel,
               row.rule, row.format, row.gradient, threads, params_per_s * 1e-6, bytes_per_s * 1e-9,
               triad_bytes_per_s * 1e-9, bytes_per_s / triad_bytes_per_s);
    std::fflush(stdout);
    return;
  }
  nlohmann::ordered_json json;
  json["kernel"] = row.kernel;
  json["isa"] = kernels::kernels().isa();
  if (!row.rule.empty()) json["rule"] = row.rule;
  if (!row.format.empty()) json["format"] = row.format;
  if (!row.gradient.empty()) json["gradient"] = row.gradient;
  if (row.share > 0) json["share"] = row.share;
  json["threads"] = threads;
  json["params"] = elements_;
  json["params_per_s"] = params_per_s;
  json["params_per_s_min"] =
      static_cast<double>(elements_) / *std::max_element(kernel_s.begin(), kernel_s.end());
  json["params_per_s_max"] =
      static_cast<double>(elements_) / *std::min_element(kernel_s.begin(), kernel_s.end());
  json["bytes_per_s"] = bytes_per_s;
  json["triad_bytes_per_s"] = triad_bytes_per_s;
  json["share_of_triad"] = bytes_per_s / triad_bytes_per_s;
  fmt::print("{}\n  {}", std::exchange(first_row_, false) ? "" : ",", json.dump());
  std::fflush(stdout);
}

}  // namespace smartinf::apps
