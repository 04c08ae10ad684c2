// Machines as the simulator sees them: a handful of rates and sizes, read from a TOML file. Every
// value means one physical thing; docs/simulator.md says where each of the shipped ones comes from.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/plan/schedule.h"
#include "smartinf/sim/fpga_pipeline.h"

namespace smartinf::sim {

struct Gpu {
  std::string name;  // "none": no GPU, the host computes
  uint32_t count = 1;
  uint64_t memory_bytes = 0;
  double peak_flops = 0;             // dense 16-bit tensor rate
  double product_efficiency = 0.68;  // share of the peak that large matrix products reach
  double memory_bytes_per_s = 0;     // its own memory
  double activation_passes = 2;      // times that what lies between products is moved through it
  double select_passes = 90;         // times that a gradient (f32) is moved through it by Top-K
  double link_bytes_per_s = 0;       // to the host, each direction
  bool links_shared = false;         // several GPUs behind one link of that rate
  bool link_is_host_link = false;    // ... which is also the devices' (a congested expansion)
};

struct Host {
  uint64_t memory_bytes = 0;
  double link_bytes_per_s = 0;     // shared by all devices, each direction
  double update_bytes_per_s = 0;   // host update: state and gradient in, state out
  double weights_bytes_per_s = 0;  // of new weights, where devices have a limit of their own too
  double copy_bytes_per_s = 0;     // pinned-buffer copies and casts around the host link
  // SmartComp on the cores of the host, all that do it together; 0: the GPU selects.
  double select_params_per_s = 0;
  double step_ahead_params_per_s = 0;  // of new weights, by what was not sent; 0: no such pass
  // Products of few rows on all cores, of which decoding consists; 0: at the GPU's rates.
  double decode_flops = 0;
  double decode_bytes_per_s = 0;       // weights, where arithmetic is not the limit
  double decode_value_s = 0;    // an output of a row: its end, and work between products; 0: a
                                // quarter of decode_flops' time
  double decode_product_s = 0;  // a product by itself: threads that begin and end it
  double row_s = 0;  // of a row number of a table: sorting it, and adding its gradient up
  uint64_t process_bytes = 0;          // resident before a model is there: torch, runtime, text
};

/// Devices of one kind; of remote ones those in one server.
struct DeviceGroup {
  std::string name;
  uint32_t count = 1;
  double read_bytes_per_s = 0;   // alone, steady state
  double reads_only_bytes_per_s = 0;  // where reads have a limit below that; 0: they have not
  double write_bytes_per_s = 0;  // alone, steady state, after the drive's cache
  double mixed_efficiency = 1;   // share of the rate while it reads and writes at once
  double write_amplification = 1;
  uint64_t burst_bytes = 0;  // written at the read rate after an idle time: the drive's cache
  /// As much as all of the host's cores could read and write if they did nothing else: time of the
  /// kernel, and of a virtual machine's host, which takes it from the cores. Where its processor is
  /// cores that also compute; 0: none.
  double cores_bytes_per_s = 0;
  /// Bytes that a step has written, over the time of the sync (fdatasync) that ends it, which
  /// empties the drive's volatile cache; 0: it takes no time.
  double sync_bytes_per_s = 0;
  // Of tables' rows. Pages of 4096 bytes at random, many at once; 0: as its bytes.
  double page_reads_per_s = 0;
  double page_writes_per_s = 0;
  double sync_s = 0;            // a sync of little
  double page_s = 0;            // of the one thread: to check a page and take a row up from it
  double row_s = 0;             // likewise: to find a row that is in memory
  double row_bytes_per_s = 0;   // of records that it updates and writes to the log; 0: no limit
  double link_bytes_per_s = 0;  // its own link to the host, each direction
  double latency_s = 0;         // of one command over that link
  /// Behind Machine::network in place of the host's link (`smartinf serve`): the link is their
  /// server's, which all of them share.
  bool remote = false;
  double update_bytes_per_s = 0;      // processor: state and gradient in; 0: cannot update
  double decompress_bytes_per_s = 0;  // processor with SmartComp: state and compressed gradient in
  /// Keys and values that its processor attends to, with on_host_cores all cores; 0:
  /// update_bytes_per_s, whose reads are as many and which writes as well, and where there are
  /// kernels the drive's rate.
  double fold_bytes_per_s = 0;
  bool update_streams = false;        // overlapped, it works on a subgroup while that is being read
  /// A pipeline takes in so many elements in a cycle, whatever the update rule: the two rates are
  /// of Adam in f32 with dense gradients, and with those compressed to 2 %, where one element in a
  /// hundred has an (index, value) pair.
  bool pipeline = false;
  double pairs_per_s = 0;          // of more pairs than that, which it puts in place one by one
  FpgaPipeline kernel;             // in place of the rates above: the kernels of fpga/
  double weights_bytes_per_s = 0;  // new weights, by the host's thread for it; 0: host copies
  bool on_host_cores = false;  // its processor is the host's cores, which without a GPU compute too
  uint64_t memory_bytes = 0;
  uint64_t capacity_bytes = 0;
  uint64_t endurance_bytes = 0;  // rated bytes written over its life; 0: not known
  double price = 0;

  bool updates() const { return update_bytes_per_s > 0 || kernel.clock_hz > 0; }
  /// Of reads with no writes beside them.
  double reads_only() const {
    return reads_only_bytes_per_s > 0 ? reads_only_bytes_per_s : read_bytes_per_s;
  }
  bool decompresses() const { return decompress_bytes_per_s > 0 || kernel.clock_hz > 0; }
};

/// How the software uses the machine; it differs between the paper's stack and this one.
struct Software {
  double update_start_s = 0;  // from the last gradient until devices begin to update
  uint64_t subgroup_elements = 40'000'000;
  uint32_t slots = 2;
  uint64_t in_flight_bytes = 0;  // of transfers that fill a drive, one way; 0: not measured
  uint32_t gradient_bytes = 4;                                            // on the host link
  uint32_t weight_bytes = 4;                                              // on the way back
  plan::ScheduleVariant overlapped = plan::ScheduleVariant::kOverlapped;  // meant by su+o
  double buffered_row_s = 0;  // of handing a device one head's row of values that waits in the host
  bool gradient_spilled = true;  // gradients wait on the drive, not in device memory
  bool offload_waits = true;     // backward stands still while a layer's gradients leave
};

/// Between machines that train together, and to those that serve devices.
struct Network {
  double bytes_per_s = 0;       // of one machine, each direction; 0: there is none
  double latency_s = 0;         // of one message
  double near_bytes_per_s = 0;  // between ranks of one machine, all that they send; 0: no limit
  /// Rate of what remote devices are sent and send: as much as all cores could encrypt, check and
  /// copy if they did nothing else. It takes their time where they also compute, without a GPU; 0:
  /// none.
  double cores_bytes_per_s = 0;
  double ranks_cores_bytes_per_s = 0;  // likewise of what ranks of several machines send and get
};

struct Price {
  double host = 0;
  double gpu = 0;
  double power_watts = 0;
  double per_kwh = 0;
  double life_years = 4;
};

struct Machine {
  std::string name;
  std::string origin;  // file or preset, for messages
  std::string note;
  Gpu gpu;
  Host host;
  std::vector<DeviceGroup> devices;
  Network network;
  Software software;
  Price price;

  uint32_t device_count() const;
  /// Whether every device has a processor that updates.
  bool can_update() const;
  /// Whether some device is behind the network.
  bool has_remote() const;
  /// One entry per device.
  std::vector<const DeviceGroup*> each_device() const;
};

/// Shipped machines, e.g. "smartssd-a5000".
std::vector<std::string_view> machine_preset_names();
/// GPUs by name, to put into any machine.
std::vector<std::string_view> gpu_preset_names();
base::Result<Gpu> gpu_preset(std::string_view name);

/// `name_or_path`: a preset, or a file when it ends in .toml or holds a slash.
/// Errors: kNotFound with the nearest preset; kInvalidArgument naming file, line and key, with the
/// nearest key for one that is not known.
base::Result<Machine> load_machine(std::string_view name_or_path);
base::Result<Machine> parse_machine(std::string_view toml_text, std::string_view origin);
/// The text that parse_machine reads back to the same machine.
std::string machine_to_toml(const Machine& machine);
base::Status check_machine(const Machine& machine);

}  // namespace smartinf::sim
