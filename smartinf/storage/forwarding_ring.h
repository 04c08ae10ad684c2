// The base of rings that wrap another and change only some of what it does.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "smartinf/storage/ring.h"

namespace smartinf::storage {

/// Passes everything on. Derived rings override submit() and reap(), and name() where it matters.
class ForwardingRing : public Ring {
 public:
  explicit ForwardingRing(std::unique_ptr<Ring> inner) : inner_(std::move(inner)) {}

  std::string_view name() const override { return inner_->name(); }
  uint32_t depth() const override { return inner_->depth(); }
  base::Result<uint32_t> add_file(int descriptor, std::string path) override {
    return inner_->add_file(descriptor, std::move(path));
  }
  base::Status register_memory(std::span<std::byte> memory) override {
    return inner_->register_memory(memory);
  }
  base::Status submit(std::span<IoRequest* const> requests) override {
    return inner_->submit(requests);
  }
  base::Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) override {
    return inner_->reap(done, wait);
  }

 private:
  std::unique_ptr<Ring> inner_;
};

}  // namespace smartinf::storage
