// engine::Updater as the Python module shows it: exceptions for statuses, the GIL released and
// signals answered in every call that may take long, and no harm from fork.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "smartinf/engine/updater.h"

#include "python/core/spool.h"
#include "python/core/weight_source.h"

namespace smartinf::python {

/// The options of an updater by their names there.
engine::UpdaterOptions updater_options(const nanobind::dict& given);
/// Options for devices of other machines, by their names there.
serve::RemoteOptions remote_options(const nanobind::dict& given);

/// The option "compress" with what it leaves out. Errors: as those of an Updater.
nanobind::dict compress_options(const nanobind::dict& given);

/// The state that the first of some devices holds that has one.
struct StoredState {
  std::vector<std::pair<std::string, std::vector<uint64_t>>> parameters;  // names and shapes
  bool gradient_room = false;      // for gradients that do not fit in memory
  uint64_t subgroup_elements = 0;  // of the largest one
};
/// Nothing: there is no state, or it cannot be read.
std::optional<StoredState> stored_state(const engine::DeviceSources& sources);

/// Documented for its users in module.cc.
class PyCheckpoint;  // checkpoint.h

class PyUpdater final : public PyWeightSource {
 public:
  PyUpdater(const nanobind::dict& options, const std::vector<std::string>& names,
            const std::vector<std::vector<uint64_t>>& shapes);
  ~PyUpdater() override;

  bool fresh() { return core().fresh(); }
  std::string client_metadata() { return core().client_metadata(); }
  uint64_t count() override { return core().space().count(); }

  void initialize(nanobind::callable provide, std::string client_metadata);
  void read_state(uint32_t planes, nanobind::callable visit);
  void edit_state(nanobind::object edit, std::string client_metadata, uintptr_t residual,
                  const std::vector<std::array<float, 3>>& ahead);
  std::vector<std::array<float, 3>> step_ahead();
  uintptr_t residual();
  nanobind::dict compression();
  void load_weights(const std::string& type, uintptr_t address, const std::optional<PySpans>& kept);

  void begin_step();
  void put_gradients(const std::vector<size_t>& ranges, const std::vector<uintptr_t>& addresses,
                     const std::vector<std::string>& types);
  void put_gradient_part(size_t range, uint64_t first, uintptr_t address, const std::string& type,
                         uint64_t count);
  void skip_gradient(size_t range);
  std::tuple<double, bool, std::string> finish_gradients(double unscale);
  std::string early_update_refusal();
  void start_early_update(uint64_t number, double gradient_scale, const nanobind::list& groups,
                          const std::string& type, uintptr_t address, double norm_max,
                          const std::optional<PySpans>& kept);
  void start_update(uint64_t number, double gradient_scale, const nanobind::list& groups,
                    const std::string& type, uintptr_t address, const std::optional<PySpans>& kept,
                    const std::vector<double>& table_rates);
  void wait_weights(uint64_t first, uint64_t count);
  void start_commit(std::string client_metadata);
  bool committing() { return core().committing(); }
  void wait_commit();
  void abort();

  // Tables of the options, by their number there. ids: address of [count] i64.
  void prefetch_rows(size_t table, uintptr_t ids, size_t count);
  void gather_rows(size_t table, uintptr_t ids, size_t count, const std::string& type,
                   uintptr_t out, bool keep);
  void add_row_gradient(size_t table, uintptr_t ids, size_t count, const std::string& type,
                        uintptr_t gradient);
  void put_rows(size_t table, uintptr_t ids, size_t count, uintptr_t values);
  void read_records(size_t table, uint64_t first, uint64_t count, nanobind::callable visit);
  void load_tables(const PyCheckpoint& from);

  /// Copies the committed state, durably; progress(bytes done, bytes in all).
  void save_checkpoint(const std::string& path, bool replace, std::string trainer,
                       nanobind::callable progress);

  nanobind::dict traffic();
  uint64_t memory_bytes() { return core().memory_bytes(); }
  uint64_t state_cache_bytes() { return core().state_cache_bytes(); }
  uint64_t gradient_memory_bytes() { return core().gradient_memory_bytes(); }
  std::vector<std::string> describe_devices() { return core().describe_devices(); }
  /// Null without the option spool_bytes; closed with the updater.
  std::shared_ptr<PySpool> spool();
  void close();

  engine::WeightSource& weights() override { return core(); }

 private:
  /// The updater, unless it was closed or belongs to the process that forked this one.
  engine::Updater& core();
  const plan::ParameterRange& range(size_t index);
  /// Errors: there are no tables, or not so many.
  engine::RowTables& tables(size_t index);
  /// groups: see start_update() in module.cc.
  engine::UpdateOptions update_options(uint64_t number, double gradient_scale,
                                       const nanobind::list& groups) const;
  engine::CompressionState compression_state();  // empty without compression

  kernels::RuleOptions rule_;
  std::unique_ptr<engine::Updater> updater_;
  std::shared_ptr<PySpool> spool_;  // shared with Python; null until it is asked for
};

}  // namespace smartinf::python
