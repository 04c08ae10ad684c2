// The spool of a local device: bytes that go to the drive and come back, of no step and without
// recovery. Served as they come, beside updates and gradients, straight from and to the caller's
// memory.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/csd/beside_access.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

/// Computes the checksums on the device's I/O thread: those of a put while the drive writes.
class SpoolAccess final : public BesideAccess {
 public:
  explicit SpoolAccess(DeviceParts& parts) : parts_(parts) {}

  bool serves(const Command& command) const override {
    return command.as<PutSpool>() != nullptr || command.as<GetSpool>() != nullptr;
  }
  void serve(Command& command, base::Status refusal) override;
  bool took(storage::SubgroupIo& io) override;
  bool moving() const override { return moving_ > 0; }
  bool idle() const override { return accesses_.empty(); }
  void abandon(const base::Status& status) override;
  void on_time(uint64_t now_ns) override;
  uint64_t next_due_ns() const override;

 private:
  struct Span {
    uint64_t bytes = 0;
    uint32_t users = 0;  // transfers of it that are under way
    bool written = false;
    std::vector<uint64_t> checksums;  // of each kSpoolBlockBytes
  };
  using Spans = std::map<uint64_t, Span>;  // by offset
  struct Access {
    storage::SubgroupIo io;  // io.owner is this
    Command* command = nullptr;
    Span* span = nullptr;
    bool moved = false;
    uint64_t due_ns = 0;  // when it will have passed the host link
    uint64_t begin_ns = 0;
  };

  base::Result<Span*> span_to_put(uint64_t offset_bytes, uint64_t bytes);
  base::Result<Span*> span_to_get(uint64_t offset_bytes, uint64_t bytes);
  void pass_host_link(Access& access, LinkDirection direction);
  base::Status verify(const Access& access) const;
  void answer_if_passed(Access& access, uint64_t now_ns);
  void answer(Access& access, base::Status status);

  DeviceParts& parts_;
  Spans spans_;
  std::list<Access> accesses_;  // bound: one per command in flight
  std::list<Access> lost_;      // by a store that cannot go on, and may still know them
  uint32_t moving_ = 0;
};

}  // namespace smartinf::csd
