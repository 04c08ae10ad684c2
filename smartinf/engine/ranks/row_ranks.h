// Rows of tables between ranks: each asks those that have a row's device for its weights, and sends
// them its gradients, one for each id, so that they are added up in the order of one process: those
// of rank 0 first. All calls are collective, over Channel::kControl; a failure of one rank is the
// error of the call on all, with the rank's name.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/device_set.h"
#include "smartinf/engine/options.h"
#include "smartinf/engine/ranks/collectives.h"

namespace smartinf::engine {

/// Devices are those of all ranks, rank by rank where each has a run of its own.
class RowRanks {
 public:
  /// shares: of the set's devices in; of all devices out. call: what is the same on all ranks.
  /// Null for one process. Errors: kFailedPrecondition where the ranks open other tables.
  static base::Result<std::unique_ptr<RowRanks>> make(const UpdaterOptions& options,
                                                      const DeviceSet& set, std::string_view call,
                                                      std::vector<double>& shares);

  /// Of the set's first device.
  uint32_t first_device() const { return first_; }
  bool is_here(uint32_t device) const { return rank_of_[device] == ranks_->rank(); }
  base::Status all_ok(std::string_view call, const base::Status& mine) const;
  /// Rank 0's to all, as many on each.
  base::Status broadcast(std::string_view call, const base::Status& mine,
                         std::span<std::byte> bytes) const;

  /// [device][rows], numbered by their devices.
  using Rows = std::vector<std::vector<uint32_t>>;
  /// rows: ascending. read: of the devices here reads the rows that any rank asks for, in that
  /// order. Returns values of the rows asked for, in their order. mine: whether this rank can ask.
  base::Result<std::vector<std::byte>> gather(
      const std::string& call, const base::Status& mine, const Rows& rows, uint64_t row_bytes,
      const std::function<base::Status(const Rows& rows, std::span<std::byte> out)>& read) const;

  /// Rows with values, for each rank.
  using Parcels = std::vector<std::vector<std::byte>>;
  Parcels make_parcels() const { return Parcels(ranks_->world()); }
  /// Adds a row to what goes to the rank that has its device.
  void add_row(uint32_t table, uint32_t device, uint64_t row, base::DataType type,
               std::span<const std::byte> values, Parcels& parcels) const;
  /// Hands what all ranks have for this one to add(), in the order of the ranks, and leaves
  /// `parcels` empty.
  using Add = std::function<base::Status(uint32_t table, std::span<const int64_t> rows,
                                         base::DataType type, const std::byte* values)>;
  base::Status share(std::string_view call, const base::Status& mine, Parcels& parcels,
                     const Add& add) const;

  /// of_device: bytes of every device; those of other ranks' devices come, as many.
  base::Status share_records(std::string_view call, const base::Status& mine,
                             std::vector<std::vector<std::byte>>& of_device) const;

  /// Values of every rank on all of them, by rank.
  template <typename T>
  base::Result<std::vector<T>> gather_all(std::string_view call, const base::Status& mine,
                                          const std::vector<T>& values) const {
    const auto bytes = std::as_bytes(std::span(values));
    SI_ASSIGN_OR_RETURN(const std::vector<std::byte> all, gather_bytes(call, mine, bytes));
    std::vector<T> out(all.size() / sizeof(T));
    std::ranges::copy(all, std::as_writable_bytes(std::span(out)).begin());
    return out;
  }

 private:
  explicit RowRanks(std::shared_ptr<Collectives> ranks) : ranks_(std::move(ranks)) {}
  base::Result<std::vector<std::byte>> gather_bytes(std::string_view call, const base::Status& mine,
                                                    std::span<const std::byte> bytes) const;

  const std::shared_ptr<Collectives> ranks_;
  std::vector<uint32_t> rank_of_;  // of every device
  uint32_t first_ = 0;
};

}  // namespace smartinf::engine
