#include "smartinf/engine/ranks/row_ranks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/engine/ranks/byte_exchange.h"
#include "smartinf/engine/ranks/messages.h"

namespace smartinf::engine {

using base::Result;
using base::Status;

namespace {

/// Before the values of one row.
struct ValuesHead {
  uint64_t row = 0;  // of the whole table
  uint32_t table = 0;
  uint32_t value_bytes = 0;
  uint64_t type = 0;  // base::DataType
};

template <typename T>
void append(std::vector<std::byte>& bytes, std::span<const T> values) {
  const auto more = std::as_bytes(values);
  bytes.insert(bytes.end(), more.begin(), more.end());
}

}  // namespace

Result<std::unique_ptr<RowRanks>> RowRanks::make(const UpdaterOptions& options,
                                                 const DeviceSet& set, std::string_view call,
                                                 std::vector<double>& shares) {
  const auto& ranks = options.collectives != nullptr ? options.collectives : options.peers;
  if (ranks == nullptr) return std::unique_ptr<RowRanks>();
  std::unique_ptr<RowRanks> made(new RowRanks(ranks));
  SI_RETURN_IF_ERROR(made->all_ok(call, Status()));
  if (options.collectives != nullptr) {
    for (const auto& device : set.devices) made->rank_of_.push_back(device->info().rank);
    return made;
  }
  SI_ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                      all_gather(*ranks, Channel::kControl, pack(shares)));
  shares.clear();
  for (uint32_t rank = 0; rank < texts.size(); ++rank) {
    std::vector<double> of_rank;
    SI_RETURN_IF_ERROR(unpack(texts[rank], of_rank));
    if (rank == ranks->rank()) made->first_ = static_cast<uint32_t>(shares.size());
    shares.insert(shares.end(), of_rank.begin(), of_rank.end());
    made->rank_of_.resize(shares.size(), rank);
  }
  return made;
}

Status RowRanks::all_ok(std::string_view call, const Status& mine) const {
  return engine::all_ok(*ranks_, Channel::kControl, call, mine);
}

Status RowRanks::broadcast(std::string_view call, const Status& mine,
                           std::span<std::byte> bytes) const {
  std::vector<std::vector<std::byte>> to(ranks_->world());
  if (ranks_->rank() == 0) std::ranges::fill(to, std::vector(bytes.begin(), bytes.end()));
  SI_ASSIGN_OR_RETURN(const auto got, exchange(*ranks_, Channel::kControl, call, mine, to));
  std::ranges::copy(got.front(), bytes.begin());
  return Status();
}

Result<std::vector<std::byte>> RowRanks::gather(
    const std::string& call, const Status& mine, const Rows& rows, uint64_t row_bytes,
    const std::function<Status(const Rows&, std::span<std::byte>)>& read) const {
  // To each rank, for each of its devices: how many rows, and which.
  std::vector<std::vector<std::byte>> asked(ranks_->world());
  for (uint32_t d = 0; d < rank_of_.size(); ++d) {
    const std::span<const uint32_t> wanted =
        d < rows.size() ? std::span<const uint32_t>(rows[d]) : std::span<const uint32_t>();
    const auto count = static_cast<uint32_t>(wanted.size());
    append(asked[rank_of_[d]], std::span(&count, 1));
    append(asked[rank_of_[d]], wanted);
  }
  SI_ASSIGN_OR_RETURN(const auto asked_here,
                      exchange(*ranks_, Channel::kControl, call, mine, asked));
  // visit(device, its rows) of each rank's, in order.
  const auto for_rows_of = [&](size_t rank, const auto& visit) {
    std::span<const std::byte> left = asked_here[rank];
    for (uint32_t d = 0; d < rank_of_.size(); ++d) {
      if (!is_here(d)) continue;
      uint32_t count = 0;
      std::memcpy(&count, left.data(), sizeof count);
      left = left.subspan(sizeof count);
      std::vector<uint32_t> wanted(count);
      if (count > 0) std::memcpy(wanted.data(), left.data(), count * sizeof(uint32_t));
      left = left.subspan(count * sizeof(uint32_t));
      visit(d, wanted);
    }
  };
  Rows here(rank_of_.size());
  for (size_t rank = 0; rank < asked_here.size(); ++rank) {
    for_rows_of(rank, [&](uint32_t d, const std::vector<uint32_t>& wanted) {
      here[d].insert(here[d].end(), wanted.begin(), wanted.end());
    });
  }
  std::vector<size_t> first(here.size());
  size_t count = 0;
  for (size_t d = 0; d < here.size(); ++d) {
    std::ranges::sort(here[d]);
    here[d].erase(std::ranges::unique(here[d]).begin(), here[d].end());
    first[d] = count;
    count += here[d].size();
  }
  std::vector<std::byte> values(count * row_bytes);
  const Status status = read(here, values);
  std::vector<std::vector<std::byte>> answers(ranks_->world());
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    for_rows_of(rank, [&](uint32_t d, const std::vector<uint32_t>& wanted) {
      size_t at = 0;
      for (const uint32_t row : wanted) {
        while (here[d][at] != row) ++at;
        append(answers[rank],
               std::span<const std::byte>(values).subspan((first[d] + at) * row_bytes, row_bytes));
      }
    });
  }
  SI_ASSIGN_OR_RETURN(const auto got, exchange(*ranks_, Channel::kControl, call, status, answers));
  std::vector<size_t> taken(got.size());
  std::vector<std::byte> ordered;
  for (size_t d = 0; d < rows.size(); ++d) {
    const uint32_t rank = rank_of_[d];
    const uint64_t bytes = rows[d].size() * row_bytes;
    append(ordered, std::span<const std::byte>(got[rank]).subspan(taken[rank], bytes));
    taken[rank] += bytes;
  }
  return ordered;
}

void RowRanks::add_row(uint32_t table, uint32_t device, uint64_t row, base::DataType type,
                       std::span<const std::byte> values, Parcels& parcels) const {
  const ValuesHead head{row, table, static_cast<uint32_t>(values.size()),
                        static_cast<uint64_t>(type)};
  std::vector<std::byte>& parcel = parcels[rank_of_[device]];
  append(parcel, std::span(&head, 1));
  append(parcel, values);
  parcel.resize(base::round_up(parcel.size(), sizeof head.row));
}

Status RowRanks::share(std::string_view call, const Status& mine, Parcels& parcels,
                       const Add& add) const {
  SI_ASSIGN_OR_RETURN(const auto got, exchange(*ranks_, Channel::kControl, call, mine, parcels));
  parcels = make_parcels();
  for (std::span<const std::byte> left : got) {
    while (!left.empty()) {
      ValuesHead head;
      std::memcpy(&head, left.data(), sizeof head);
      const auto row = static_cast<int64_t>(head.row);
      SI_RETURN_IF_ERROR(add(head.table, std::span(&row, 1), static_cast<base::DataType>(head.type),
                             left.data() + sizeof head));
      left = left.subspan(sizeof head + base::round_up(head.value_bytes, sizeof head.row));
    }
  }
  return Status();
}

Status RowRanks::share_records(std::string_view call, const Status& mine,
                               std::vector<std::vector<std::byte>>& of_device) const {
  std::vector<std::byte> here;
  for (uint32_t d = 0; d < of_device.size(); ++d) {
    if (is_here(d)) append(here, std::span<const std::byte>(of_device[d]));
  }
  SI_ASSIGN_OR_RETURN(const std::vector<std::byte> all, gather_bytes(call, mine, here));
  std::span<const std::byte> left = all;
  for (uint32_t rank = 0; rank < ranks_->world(); ++rank) {
    for (uint32_t d = 0; d < of_device.size(); ++d) {
      if (rank_of_[d] != rank) continue;
      std::ranges::copy(left.first(of_device[d].size()), of_device[d].begin());
      left = left.subspan(of_device[d].size());
    }
  }
  return Status();
}

Result<std::vector<std::byte>> RowRanks::gather_bytes(std::string_view call, const Status& mine,
                                                      std::span<const std::byte> bytes) const {
  const std::vector<std::vector<std::byte>> to(ranks_->world(),
                                               std::vector<std::byte>(bytes.begin(), bytes.end()));
  SI_ASSIGN_OR_RETURN(const auto got, exchange(*ranks_, Channel::kControl, call, mine, to));
  std::vector<std::byte> all;
  for (const std::vector<std::byte>& one : got) append(all, std::span<const std::byte>(one));
  return all;
}

}  // namespace smartinf::engine
