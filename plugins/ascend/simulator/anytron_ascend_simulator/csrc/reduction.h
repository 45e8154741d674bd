// Reductions of the simulated HCCL, in rank order: all ranks get the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include <third_party/hccl/inc/hccl/hccl.h>

namespace reduction {

using Bytes = std::vector<char>;

inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline uint16_t to_bfloat16(float value) {
  if (value != value) return 0x7fc0;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
}

template <class Value>
Value combine(Value a, Value b, HcclReduceOp reduction) {
  switch (reduction) {
    case HCCL_REDUCE_SUM: return a + b;
    case HCCL_REDUCE_PROD: return a * b;
    case HCCL_REDUCE_MAX: return a > b ? a : b;
    default: return a < b ? a : b;
  }
}

template <class Stored, class Load, class Store>
void reduce_as(void* output, const std::vector<Bytes>& parts, size_t offset, size_t count, HcclReduceOp reduction, Load load,
               Store store) {
  for (size_t i = 0; i < count; ++i) {
    auto value = load(reinterpret_cast<const Stored*>(parts[0].data())[offset + i]);
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      value = combine(value, load(reinterpret_cast<const Stored*>(parts[rank].data())[offset + i]), reduction);
    }
    static_cast<Stored*>(output)[i] = store(value);
  }
}

template <class Value>
void reduce_plain(void* output, const std::vector<Bytes>& parts, size_t offset, size_t count, HcclReduceOp reduction) {
  const auto same = [](Value value) { return value; };
  reduce_as<Value>(output, parts, offset, count, reduction, same, same);
}

// Reduce elements [offset, offset + count) of all parts; false if HCCL does not reduce this dtype.
inline bool reduce(void* output, const std::vector<Bytes>& parts, size_t offset, size_t count, uint32_t dtype,
                   HcclReduceOp reduction) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8: reduce_plain<int8_t>(output, parts, offset, count, reduction); break;
    case HCCL_DATA_TYPE_INT16: reduce_plain<int16_t>(output, parts, offset, count, reduction); break;
    case HCCL_DATA_TYPE_INT32: reduce_plain<int32_t>(output, parts, offset, count, reduction); break;
    case HCCL_DATA_TYPE_INT64: reduce_plain<int64_t>(output, parts, offset, count, reduction); break;
    case HCCL_DATA_TYPE_FP32: reduce_plain<float>(output, parts, offset, count, reduction); break;
    case HCCL_DATA_TYPE_FP16:
      reduce_as<_Float16>(output, parts, offset, count, reduction, [](_Float16 value) { return static_cast<float>(value); },
                          [](float value) { return static_cast<_Float16>(value); });
      break;
    case HCCL_DATA_TYPE_BFP16:
      reduce_as<uint16_t>(output, parts, offset, count, reduction, from_bfloat16, to_bfloat16);
      break;
    default: return false;
  }
  return true;
}

}  // namespace reduction
