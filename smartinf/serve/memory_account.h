// Account of the memory that a served device may take of its machine: asked for before it is taken.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace smartinf::serve::wire {

/// Threads: any.
class MemoryAccount {
 public:
  explicit MemoryAccount(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  bool take(uint64_t bytes) {
    uint64_t used = used_bytes_.load();
    do {
      if (bytes > limit_bytes_ || used > limit_bytes_ - bytes) return false;
    } while (!used_bytes_.compare_exchange_weak(used, used + bytes));
    return true;
  }
  void give_back(uint64_t bytes) { used_bytes_ -= bytes; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t limit_bytes() const { return limit_bytes_; }

 private:
  const uint64_t limit_bytes_;
  std::atomic<uint64_t> used_bytes_{0};
};

/// Bytes that were taken, until destruction. The account outlives it.
class Charge {
 public:
  Charge() = default;
  Charge(MemoryAccount& account, uint64_t bytes) {
    if (account.take(bytes)) {
      account_ = &account;
      bytes_ = bytes;
    }
  }
  Charge(Charge&& other) noexcept
      : account_(std::exchange(other.account_, nullptr)), bytes_(other.bytes_) {}
  Charge& operator=(Charge&& other) noexcept {
    std::swap(account_, other.account_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Charge() {
    if (account_ != nullptr) account_->give_back(bytes_);
  }
  bool taken() const { return account_ != nullptr; }

 private:
  MemoryAccount* account_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace smartinf::serve::wire
