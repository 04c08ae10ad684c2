// A local device: how one is made, and how one is opened.
#include <utility>

#include "smartinf/csd/device_over_store.h"
#include "smartinf/csd/linked_ring.h"
#include "smartinf/csd/local_device.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

using base::Result;

Result<std::unique_ptr<Device>> create_local_device(LocalDeviceOptions options,
                                                    const storage::StoreLayout& layout) {
  auto store = storage::Store::create(options.path, layout, linked_store_options(options));
  if (!store.ok()) return std::move(store).status().with_context(options.device_name());
  return make_device_over(std::move(*store), StoreOrigin::kCreated, std::move(options), "local");
}

Result<std::unique_ptr<Device>> open_local_device(LocalDeviceOptions options) {
  auto store = storage::Store::open(options.path, linked_store_options(options));
  if (!store.ok()) return std::move(store).status().with_context(options.device_name());
  return make_device_over(std::move(*store), StoreOrigin::kOpened, std::move(options), "local");
}

}  // namespace smartinf::csd
