#include "python/core/cache.h"

#include <algorithm>
#include <utility>

#include <unistd.h>

#include "smartinf/engine/device_key_value_store.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/storage/store.h"

#include "python/core/arguments.h"
#include "python/core/updater.h"

namespace nb = nanobind;

namespace smartinf::python {
namespace {

using base::ErrorCode;
using base::Status;
using engine::KeyValueStore;
using engine::SequenceId;

constexpr uint64_t kDeviceBlocksMin = 16;  // of memory for each device

}  // namespace

PyCache::PyCache(const nb::dict& options, const std::vector<uint32_t>& windows, uint32_t heads,
                 uint32_t kv_heads, uint32_t head_width, float softcap, const std::string& format,
                 uint64_t memory_bytes, uint32_t threads)
    : owner_(getpid()) {
  if (windows.empty() || kv_heads == 0 || head_width == 0 || heads == 0 || heads % kv_heads != 0) {
    usage("a cache of a shape that no model has");
  }
  shape_.attention.block = {kv_heads, head_width, named<kernels::CacheFormat>("format", format)};
  shape_.attention.heads = heads;
  shape_.attention.scale = 1;  // queries come scaled
  shape_.attention.softcap = softcap;
  shape_.layers = static_cast<uint32_t>(windows.size());
  shape_.windows = windows;
  const engine::UpdaterOptions made = updater_options(options);
  const nb::gil_scoped_release released;
  if (made.devices.empty()) {
    store_ = engine::make_memory_store(shape_, memory_bytes,
                                       engine::make_decoder_team(std::max(1u, threads)));
    return;
  }
  engine::DeviceStoreOptions store;
  store.shape = shape_;
  store.job = storage::make_run_id().bytes;
  store.identity = "a DeviceCache";
  store.device_memory_bytes =
      std::max(kDeviceBlocksMin * kernels::cache_block_bytes(shape_.attention.block),
               memory_bytes / made.devices.size());
  sources_ = engine::local_sources(made);
  std::vector<bool> empty;
  for (const auto& source : sources_) {
    const auto found = source->peek();
    empty.push_back(found.ok() && !found->has_value());
  }
  auto opened = engine::make_device_store(sources_, std::move(store));
  for (size_t d = 0; !opened.ok() && d < sources_.size(); ++d) {
    if (empty[d]) (void)sources_[d]->erase();  // what may have been made there
  }
  store_ = take(std::move(opened));
}

PyCache::~PyCache() {
  if (getpid() != owner_) {
    (void)store_.release();  // its threads live in the parent
    return;
  }
  const nb::gil_scoped_release released;
  store_.reset();
}

void PyCache::run(const std::function<void(KeyValueStore&)>& work) {
  if (getpid() != owner_) {
    throw StatusError(Status(ErrorCode::kFailedPrecondition,
                             "this cache belongs to the process that this one was forked from",
                             "Make a new one here, on other devices."));
  }
  const nb::gil_scoped_release released;
  const std::lock_guard lock(mutex_);
  if (store_ == nullptr) {
    throw StatusError(
        Status(ErrorCode::kFailedPrecondition, "the cache is closed", "Make a new one."));
  }
  work(*store_);
}

void PyCache::check_layer(uint32_t layer) const {
  if (layer >= shape_.layers) usage("there is no layer " + std::to_string(layer));
}

uint64_t PyCache::sequence_bytes(uint64_t tokens) const {
  return engine::memory_store_bytes(shape_, tokens);
}

void PyCache::open(SequenceId id, uint64_t tokens_max) {
  run([&](KeyValueStore& store) { check(store.open(id, tokens_max)); });
}

void PyCache::drop(SequenceId id) {
  run([&](KeyValueStore& store) { store.close(id); });
}

void PyCache::append(uint32_t layer, const Runs& runs, const std::string& type, uintptr_t keys,
                     uintptr_t values) {
  check_layer(layer);
  const base::DataType given = data_type(type);
  const kernels::CacheBlockShape& block = shape_.attention.block;
  const uint64_t token_bytes =
      uint64_t{block.kv_heads} * block.head_width * base::data_type_bytes(given);
  run([&](KeyValueStore& store) {
    for (const auto& [id, first, count] : runs) {
      check(store.append(id, layer, count, given,
                         reinterpret_cast<const std::byte*>(keys) + first * token_bytes,
                         reinterpret_cast<const std::byte*>(values) + first * token_bytes));
    }
  });
}

void PyCache::attend(uint32_t layer, const std::vector<SequenceId>& ids, uintptr_t queries,
                     uintptr_t out) {
  check_layer(layer);
  const uint64_t floats = uint64_t{shape_.attention.heads} * shape_.attention.block.head_width;
  std::vector<engine::AttendQuery> asked;
  for (const SequenceId id : ids) {
    asked.push_back({id, reinterpret_cast<const float*>(queries) + asked.size() * floats,
                     reinterpret_cast<float*>(out) + asked.size() * floats});
  }
  run([&](KeyValueStore& store) {
    check(store.finish_attend(take(store.begin_attend(layer, asked))));
  });
}

nb::dict PyCache::traffic() {
  base::TrafficReading traffic;
  run([&](KeyValueStore& store) { traffic = store.traffic(); });
  nb::dict out;
  out["read"] = traffic.up(base::TrafficKind::kCache);
  out["written"] = traffic.down(base::TrafficKind::kCache);
  return out;
}

void PyCache::close() {
  if (getpid() != owner_) return;
  const nb::gil_scoped_release released;
  const std::lock_guard lock(mutex_);
  if (store_ == nullptr) return;
  store_.reset();
  check(engine::erase_device_store(sources_));
}

}  // namespace smartinf::python
