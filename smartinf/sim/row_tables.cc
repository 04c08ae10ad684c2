#include "smartinf/sim/row_tables.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "smartinf/base/row_pages.h"
#include "smartinf/plan/row_steps.h"
#include "smartinf/sim/event_graph.h"
#include "smartinf/sim/row_ids.h"

namespace smartinf::sim {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr uint64_t kRowsSimulatedMax = 2'000'000;  // in all steps; of larger tables a part is
constexpr uint32_t kStepsMax = 5000;
constexpr uint32_t kMeasuredSteps = 16;
// A commit syncs the log of rows, the step's table and two superblocks; a merge its pages in the
// log, the homes, and two copies of the header.
constexpr double kCommitSyncs = 4;
constexpr double kMergeSyncs = 4;
constexpr double kMergeChecks = 2;  // of a page: as it was, and as it becomes
constexpr double kBetweenMergesS = 0.001;  // that a device waits for a message

double per(double rate) { return rate > 0 ? 1 / rate : 0; }

/// Seconds of one device's own resources.
struct Cost {
  double drive_s = 0;
  double thread_s = 0;
};

/// Transfers of pages at random: by their number, or by their bytes where they are large.
double pages_s(double transfers, double bytes, double pages_per_s, double bytes_per_s) {
  return std::max(transfers * per(pages_per_s), bytes * per(bytes_per_s));
}

/// Of the thread, which also hands the drive its transfers: one after the other.
Cost read_cost(const DeviceGroup& device, const plan::RowWork& work) {
  const uint64_t missing = work.rows - work.cached;
  return {pages_s(static_cast<double>(work.reads), static_cast<double>(work.read_bytes),
                  device.page_reads_per_s, device.reads_only()),
          static_cast<double>(work.cached) * device.row_s +
              static_cast<double>(missing) * device.page_s};
}

double merge_cost(const DeviceGroup& device, const plan::RowWork& work, double record_bytes) {
  if (work.merges == 0) return 0;
  const auto merges = static_cast<double>(work.merges);
  const auto pages = static_cast<double>(work.merge_reads);
  return pages_s(pages, static_cast<double>(work.merge_read_bytes), device.page_reads_per_s,
                 device.reads_only()) +
         pages_s(static_cast<double>(work.merge_writes),
                 static_cast<double>(work.merge_written_bytes), device.page_writes_per_s,
                 device.write_bytes_per_s) +
         static_cast<double>(work.merged_rows) * record_bytes * per(device.row_bytes_per_s) +
         kMergeChecks * pages * device.page_s + merges * kMergeSyncs * device.sync_s;
}

/// One device's work in a step.
struct DeviceStep {
  const DeviceGroup* device = nullptr;
  plan::RowWork gather, beside, update;
  plan::RowTraffic traffic;
  double merge_left_s = 0;  // of merging, when the update comes
};

struct StepOnClock {
  double gather_s = 0;
  double step_s = 0;
  std::array<double, 4> busy{};  // as kBusyNames
};
constexpr std::array kBusyNames{"drives", "rows' threads", "host link", "host"};

/// A step's tasks: rows up from every device, then gradients down and the update.
StepOnClock run_step(const std::vector<DeviceStep>& devices, const Machine& machine, uint64_t ids,
                     double record_bytes) {
  EventGraph graph;
  // A stage that takes each of its resources for so long.
  constexpr uint64_t kUnits = 1'000'000;
  const auto stage = [](std::initializer_list<std::pair<uint32_t, double>> uses,
                        double latency_s = 0) {
    Stage one(kUnits, {}, latency_s);
    for (const auto& [resource, seconds] : uses) {
      if (seconds > 0) one.add({resource, seconds / static_cast<double>(kUnits)});
    }
    if (one.use_count == 0) one.bytes = 0;
    return one;
  };
  const uint32_t host = graph.add_resource("host");
  const uint32_t up = graph.add_resource("host link up");
  const uint32_t down = graph.add_resource("host link down");
  const double link_s = per(machine.host.link_bytes_per_s);
  const double host_s = static_cast<double>(ids) * machine.host.row_s;
  const auto sorted = graph.add_task({stage({{host, host_s / 2}})}, {});
  const auto all_up = graph.add_task({stage({{host, host_s / 2}})}, {});
  std::vector<std::pair<uint32_t, uint32_t>> own;
  for (const DeviceStep& one : devices) {
    const DeviceGroup& device = *one.device;
    const uint32_t drive = graph.add_resource("drive");
    const uint32_t thread = graph.add_resource("thread");
    const uint32_t link = graph.add_resource("link");
    own.emplace_back(drive, thread);
    const double own_link_s = per(device.link_bytes_per_s);
    const auto gathered = static_cast<double>(one.traffic.link_up);
    const auto sent = static_cast<double>(one.traffic.link_down);
    const Cost gather = read_cost(device, one.gather);
    const auto rows_up = graph.add_task(
        {stage({{drive, gather.drive_s}}, device.latency_s), stage({{thread, gather.thread_s}}),
         stage({{up, gathered * link_s}, {link, gathered * own_link_s}})},
        {sorted});
    graph.add_dependency(all_up, rows_up);
    // Records are read, updated and appended to the log, some thousand at a time.
    const Cost again = read_cost(device, one.update);
    const double rows_s =
        static_cast<double>(one.update.rows) * record_bytes * per(device.row_bytes_per_s);
    const double log_s = static_cast<double>(one.update.log_bytes) * per(device.write_bytes_per_s);
    graph.add_task(
        {stage({{down, sent * link_s}, {link, sent * own_link_s}}, device.latency_s),
         stage({{drive, one.merge_left_s + merge_cost(device, one.update, record_bytes)}}),
         stage({{drive, again.drive_s}}), stage({{thread, again.thread_s}}),
         stage({{thread, rows_s}, {drive, log_s}}, kCommitSyncs * device.sync_s)},
        {all_up});
  }
  graph.run();
  StepOnClock times{graph.times(all_up).end_s, graph.end_s(), {}};
  const auto busy = [&](uint32_t resource) { return graph.busy_s(resource, 0, graph.end_s()); };
  for (const auto& [drive, thread] : own) {
    times.busy[0] = std::max(times.busy[0], busy(drive));
    times.busy[1] = std::max(times.busy[1], busy(thread));
  }
  times.busy[2] = std::max(busy(up), busy(down));
  times.busy[3] = busy(host);
  return times;
}

Status check(const RowTable& table) {
  const auto wrong = [](std::string what, std::string advice) {
    return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
  };
  if (table.rows == 0 || table.dim == 0 || table.dim > 1 << 20) {
    return wrong(fmt::format("a table of {} rows of {}", table.rows, table.dim),
                 "Give at least one row, of 1 to 2^20 values.");
  }
  if (table.ids == 0 || table.ids > uint64_t{1} << 30) {
    return wrong(fmt::format("{} ids in a step", table.ids), "Give 1 to 2^30.");
  }
  if (table.distinct && table.ids > table.rows / 2) {
    return wrong(
        fmt::format("{} different ids in a step of a table of {} rows", table.ids, table.rows),
        "Give at most half as many.");
  }
  return {};
}

}  // namespace

Result<RowTimes> simulate_rows(const RowTable& table, const Machine& machine,
                               const RowSteps& steps) {
  SI_RETURN_IF_ERROR(check(table));
  const std::vector<const DeviceGroup*> groups = machine.each_device();
  const size_t count = groups.size();
  if (count > 256) {
    return Status(ErrorCode::kInvalidArgument, "rows of a table lie on 256 devices at most");
  }
  const uint64_t record = kernels::record_bytes(table.rule, table.dim);
  std::vector<double> shares;
  for (const DeviceGroup* group : groups) shares.push_back(std::max(1.0, group->read_bytes_per_s));
  const std::vector<uint8_t> pattern = plan::row_pattern(shares);

  // Of a large table every so manieth row, with as large a part of its memory, log and ids.
  const auto shapes_of = [&](const plan::RowPlacement& placement, uint64_t every) {
    std::vector<plan::RowDeviceShape> shapes;
    for (size_t d = 0; d < count; ++d) {
      const uint64_t rows = placement.rows_on(static_cast<uint32_t>(d));
      plan::RowDeviceShape shape =
          plan::RowDeviceShape::make(rows * every, table.dim, record, table.value_bytes,
                                     table.memory_bytes / count, table.log_bytes / count);
      shape.rows = rows;
      shape.log_pages /= every;
      shape.cache_rows /= every;
      shapes.push_back(shape);
    }
    return shapes;
  };
  const uint64_t chunk = base::records_per_page(record);
  SI_ASSIGN_OR_RETURN(const plan::RowPlacement whole,
                      plan::RowPlacement::make(table.rows, pattern, chunk));
  RowTimes times;
  uint64_t log_rows = 0;
  for (const plan::RowDeviceShape& shape : shapes_of(whole, 1)) {
    times.device_bytes = std::max(times.device_bytes, shape.file_bytes());
    log_rows += shape.log_pages * shape.row.log_page_records;
    if (shape.fixed_bytes <= table.memory_bytes / count) continue;
    return Status(
        ErrorCode::kOutOfMemory,
        fmt::format("the table's rows on a device need {} of memory for where they are, "
                    "and its part of {} is {}",
                    base::format_bytes(shape.fixed_bytes), base::format_bytes(table.memory_bytes),
                    base::format_bytes(table.memory_bytes / count)),
        fmt::format("Give the table {}, or a smaller log.",
                    base::format_bytes(shape.fixed_bytes * count)));
  }
  times.dense_bytes = 2 * table.rows * 3 * sizeof(float) * table.dim;

  // Steady are steps once the log is merged. With few different rows among the ids that takes
  // longer.
  const uint32_t measured = steps.steps > 0 ? steps.steps : kMeasuredSteps;
  uint32_t warm_up = steps.steps > 0 ? steps.warm_up : kStepsMax;
  const uint64_t to_fill = 3 * log_rows / std::max<uint64_t>(1, std::min(table.ids, table.rows));
  const uint64_t simulated =
      table.ids * (measured + (steps.steps > 0 ? warm_up : std::min<uint64_t>(to_fill, warm_up)));
  // A part has pages of the log and rows enough of each device.
  const uint64_t every = std::clamp<uint64_t>(simulated / kRowsSimulatedMax, 1,
                                              std::max<uint64_t>(1, table.rows / 100'000));
  SI_ASSIGN_OR_RETURN(const plan::RowPlacement placement,
                      plan::RowPlacement::make(table.rows / every, pattern, chunk));
  std::vector<plan::RowDevice> devices;
  for (const plan::RowDeviceShape& shape : shapes_of(placement, every)) devices.emplace_back(shape);

  RowIds numbers(table.rows / every, table.zipf, table.distinct, every);
  std::array<double, 4> busy{};
  std::vector<double> written(count, 0.0);
  const auto scaled = [&](plan::RowWork work) {
    for (uint64_t* field :
         {&work.rows, &work.cached, &work.reads, &work.read_bytes, &work.log_bytes, &work.merges,
          &work.merged_rows, &work.merge_reads, &work.merge_read_bytes, &work.merge_writes,
          &work.merge_written_bytes}) {
      *field *= every;
    }
    return work;
  };
  const double share = 1.0 / measured;
  for (uint32_t i = 0; i < warm_up + measured; ++i) {
    const plan::RowBatch batch = plan::RowBatch::make(placement, numbers.next(table.ids));
    std::vector<DeviceStep> step(count);
    for (size_t d = 0; d < count; ++d) {
      const std::span<const uint32_t> rows = d < batch.rows.size()
                                                 ? std::span<const uint32_t>(batch.rows[d])
                                                 : std::span<const uint32_t>();
      step[d].device = groups[d];
      step[d].gather = scaled(devices[d].gather(rows));
      // An update waits for the batch that has begun.
      double merged_s = 0;
      double batch_s = 0;
      while (merged_s + kBetweenMergesS < steps.beside_s) {
        const plan::RowWork one = scaled(devices[d].merge_some());
        if (one.merges == 0) break;
        batch_s = merge_cost(*groups[d], one, static_cast<double>(record));
        merged_s += batch_s + kBetweenMergesS;
        step[d].beside += one;
      }
      step[d].merge_left_s =
          std::clamp(merged_s - steps.beside_s, 0.0, batch_s / static_cast<double>(every));
      step[d].update = scaled(devices[d].update(rows));
      devices[d].commit();
      for (uint64_t k = 0; k < every; ++k) {
        step[d].traffic += plan::row_traffic(rows, devices[d].shape().row);
      }
      if (steps.steps == 0 && step[d].update.merges + step[d].beside.merges > 0) {
        warm_up = std::min(warm_up, i + 2);
      }
      if (i < warm_up) continue;
      plan::RowWork all = step[d].gather;
      all += step[d].update;
      all += step[d].beside;
      const auto bytes_written = static_cast<double>(all.log_bytes + all.merge_written_bytes);
      written[d] += share * bytes_written;
      times.rows += share * static_cast<double>(step[d].gather.rows);
      times.cached += share * static_cast<double>(step[d].gather.cached);
      times.read_bytes += share * static_cast<double>(all.read_bytes + all.merge_read_bytes);
      times.written_bytes += share * bytes_written;
      times.link_up_bytes += share * static_cast<double>(step[d].traffic.link_up);
      times.link_down_bytes += share * static_cast<double>(step[d].traffic.link_down);
      if (d == 0) {
        const auto bytes = static_cast<double>(record);
        times.merge_s += share * (merge_cost(*groups[d], step[d].beside, bytes) +
                                  merge_cost(*groups[d], step[d].update, bytes));
      }
    }
    if (i < warm_up) continue;
    const StepOnClock clock = run_step(step, machine, table.ids, static_cast<double>(record));
    times.gather_s += share * clock.gather_s;
    times.step_s += share * clock.step_s;
    for (size_t k = 0; k < busy.size(); ++k) busy[k] += clock.busy[k];
  }
  times.update_s = times.step_s - times.gather_s;
  times.cached = times.rows > 0 ? times.cached / times.rows : 0;
  times.device_written_bytes = *std::ranges::max_element(written);
  times.bound_by = kBusyNames[static_cast<size_t>(std::ranges::max_element(busy) - busy.begin())];
  times.steps = warm_up + measured;
  return times;
}

}  // namespace smartinf::sim
