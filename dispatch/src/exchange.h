// The part of DLPack's exchange interface that reads a tensor's shape, strides, dtype and device without a copy.
// torch offers it as torch.Tensor.__dlpack_c_exchange_api__ (from 2.10 on), so nothing here depends on torch's own ABI.
#pragma once

#include <Python.h>

#include <cstdint>

namespace fla {

struct Device {
  int32_t type;
  int32_t index;
};

struct Dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct TensorView {
  void* data;
  Device device;
  int32_t ndim;
  Dtype dtype;
  int64_t* shape;
  int64_t* strides;  // null: contiguous
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major;
  uint32_t minor;
  void* previous;
  void* allocate;
  void* from_object;
  void* to_object;
  int (*view)(void* object, TensorView* out);  // borrows; never synchronises
  void* stream;
};

constexpr uint32_t kExchangeMajor = 1;
constexpr int32_t kCpu = 1;
constexpr uint8_t kSignedInteger = 0;

// Whether memory holds the tensor as it is. A pending negation or conjugation, which the exchange does not tell of, comes
// with strides; only on a single element it would not show, so one element is never taken as it is.
inline bool is_plain(const TensorView& t) {
  int64_t expected = 1;
  if (t.strides == nullptr) return true;
  for (int axis = t.ndim - 1; axis >= 0; --axis) {
    if (t.shape[axis] == 0) return true;
    if (t.shape[axis] != 1 && t.strides[axis] != expected) return false;
    expected *= t.shape[axis];
  }
  return expected != 1;
}

}  // namespace fla
