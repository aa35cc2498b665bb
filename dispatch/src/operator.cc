#include "operator.h"

#include <structmember.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "bound_call.h"

namespace fla {
namespace {

constexpr int kMaxParameters = 64;
constexpr int kMaxRank = 8;
constexpr size_t kGateRoom = 64;  // words for the values of all gates; longer ones go to Python
constexpr size_t kMaxDecisions = 1024;  // beyond that the cache starts afresh

// The sizes that vary between calls of one decision.
enum Letter : int8_t { kStatic = -1, kB = 0, kT = 1, kN = 2, kLetters = 3 };

struct Axis {
  Letter letter;
  int64_t offset;
};

enum class Kind { kTensor, kBool, kInt, kFloat, kDtype, kOpaque };

struct Parameter {
  Kind kind = Kind::kOpaque;
  bool optional = false;
  bool differentiable = false;
  std::vector<std::vector<Axis>> shapes;
};

struct Decision {
  std::vector<uint64_t> key;
  PyObject* plan;  // owned, as are the rest
  PyObject* run;   // call → results
  bool forward;    // `run` is a backend's forward: call → (results, what it saves)
  PyObject* route;
  std::vector<std::pair<Py_ssize_t, PyObject*>> derived;

  void release() {
    Py_DECREF(plan);
    Py_DECREF(run);
    Py_DECREF(route);
    for (auto& item : derived) Py_DECREF(item.second);
  }
};

using Cache = std::unordered_map<uint64_t, Decision>;

struct Operator {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  std::vector<Parameter>* parameters;
  Py_ssize_t packed;  // position of cu_seqlens, -1: none
  Py_ssize_t host_copy;
  PyTypeObject* call_type;
  PyObject* plan_for;
  PyObject* slow;
  Cache* cache;
  uint64_t generation;  // counts how often the cache was forgotten
};

// The words two calls must share to share a decision. Its capacity holds any call of an operator that was accepted.
class Key {
 public:
  void add(uint64_t word) { words_[size_++] = word; }
  void add(const char* text, size_t length) {
    add(length);
    for (size_t i = 0; i < length; i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text + i, std::min<size_t>(8, length - i));
      add(word);
    }
  }
  uint64_t hash() const {
    uint64_t even = 0x9E3779B97F4A7C15ull ^ size_, odd = 0xC2B2AE3D27D4EB4Full;
    size_t i = 0;
    for (; i + 2 <= size_; i += 2) {
      even = mix(even, words_[i]);
      odd = mix(odd, words_[i + 1]);
    }
    if (i < size_) even = mix(even, words_[i]);
    return mix(even, odd);
  }
  bool equals(const std::vector<uint64_t>& other) const {
    return other.size() == size_ && std::memcmp(other.data(), words_, size_ * 8) == 0;
  }
  std::vector<uint64_t> words() const { return {words_, words_ + size_}; }

 private:
  static constexpr size_t kCapacity = kMaxParameters * (kMaxRank + 2) + kGateRoom + 8;
  static uint64_t mix(uint64_t h, uint64_t word) {
    h = (h ^ word) * 0xFF51AFD7ED558CCDull;
    return h ^ (h >> 32);
  }
  uint64_t words_[kCapacity];
  size_t size_ = 0;
};

uint64_t bit_length(uint64_t value) { return value == 0 ? 0 : 64 - __builtin_clzll(value); }

// Arguments while they are being bound: borrowed from the caller, or owned where a replacement was made.
class Values {
 public:
  Values(PyObject* const* args, Py_ssize_t count) : count_(count) {
    std::memcpy(values_, args, sizeof(PyObject*) * count);
  }
  ~Values() {
    for (int i = 0; i < owned_count_; ++i) Py_DECREF(owned_[i]);
  }
  PyObject*& operator[](Py_ssize_t i) { return values_[i]; }
  void replace(Py_ssize_t i, PyObject* owned) {
    values_[i] = owned;
    owned_[owned_count_++] = owned;
  }
  PyObject* tuple() const {
    PyObject* result = PyTuple_New(count_);
    if (result == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < count_; ++i) {
      Py_INCREF(values_[i]);
      PyTuple_SET_ITEM(result, i, values_[i]);
    }
    return result;
  }

 private:
  Py_ssize_t count_;
  PyObject* values_[kMaxParameters];
  PyObject* owned_[kMaxParameters];
  int owned_count_ = 0;
};

// What reading the arguments found out.
struct Reading {
  Key key;
  int64_t sizes[kLetters] = {-1, -1, -1};
  bool strided[kMaxParameters] = {};
  bool any_strided = false;
  TensorView packed{}, host_copy{};
  Device device{0, 0};
  bool has_tensor = false, has_packed = false, has_host_copy = false;
};

bool read_tensor(const Parameter& parameter, PyObject* value, Py_ssize_t position, Operator* self, Reading& reading) {
  const Environment& env = environment();
  if (value == Py_None) {
    reading.key.add(~0ull);
    return parameter.optional;
  }
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  if (type != env.tensor && type != env.parameter) return false;  // subclasses have their own ideas
  TensorView view;
  if (env.api->view(value, &view) != 0) {
    PyErr_Clear();
    return false;
  }
  const std::vector<Axis>* axes = nullptr;
  for (const auto& shape : parameter.shapes) {
    if (static_cast<int32_t>(shape.size()) == view.ndim) axes = &shape;
  }
  if (axes == nullptr || view.ndim > kMaxRank) return false;
  reading.key.add(static_cast<uint64_t>(view.ndim) << 56 | static_cast<uint64_t>(view.dtype.code) << 48 |
                  static_cast<uint64_t>(view.dtype.bits) << 40 | static_cast<uint64_t>(view.dtype.lanes & 0xFF) << 32 |
                  static_cast<uint64_t>(view.device.type & 0xFFFF) << 16 | (view.device.index & 0xFFFF));
  for (int axis = 0; axis < view.ndim; ++axis) {
    const Axis& expected = (*axes)[axis];
    const int64_t size = view.shape[axis] - expected.offset;
    if (expected.letter == kStatic) {
      reading.key.add(size);
    } else if (reading.sizes[expected.letter] < 0) {
      if (size < 0) return false;
      reading.sizes[expected.letter] = size;
    } else if (reading.sizes[expected.letter] != size) {
      return false;
    }
  }
  if (!is_plain(view)) reading.strided[position] = reading.any_strided = true;
  if (!reading.has_tensor) {
    reading.device = view.device;
    reading.has_tensor = true;
  }
  if (position == self->packed) {
    reading.packed = view;
    reading.has_packed = true;
  } else if (position == self->host_copy) {
    reading.host_copy = view;
    reading.has_host_copy = true;
  }
  return true;
}

// Leaves the value in its final form; false on anything but the plainest types. `bits` collects what fits in two bits
// an option (None, False, True, or a value of its own), `key` the values.
bool read_option(const Parameter& parameter, Values& values, Py_ssize_t position, uint64_t& bits, Key& key) {
  PyObject* value = values[position];
  bits <<= 2;
  if (value == Py_None) return parameter.optional || parameter.kind == Kind::kOpaque;
  switch (parameter.kind) {
    case Kind::kBool:
      bits |= value == Py_True ? 2 : 1;
      return value == Py_True || value == Py_False;
    case Kind::kInt: {
      if (!PyLong_CheckExact(value)) return false;
      int overflow = 0;
      key.add(static_cast<uint64_t>(PyLong_AsLongLongAndOverflow(value, &overflow)));
      bits |= 3;
      return overflow == 0;
    }
    case Kind::kFloat: {
      if (PyLong_CheckExact(value)) {
        PyObject* number = PyNumber_Float(value);
        if (number == nullptr) {
          PyErr_Clear();
          return false;
        }
        values.replace(position, number);
        value = number;
      }
      if (!PyFloat_CheckExact(value)) return false;
      uint64_t word;
      const double number = PyFloat_AS_DOUBLE(value);
      std::memcpy(&word, &number, sizeof(word));
      key.add(word);
      bits |= 3;
      return true;
    }
    case Kind::kDtype:
      key.add(reinterpret_cast<uintptr_t>(value));
      bits |= 3;
      return reinterpret_cast<PyObject*>(Py_TYPE(value)) == environment().dtype;
    default:
      return false;
  }
}

int64_t entry(const TensorView& view, int64_t i) {
  const char* data = static_cast<const char*>(view.data) + view.byte_offset;
  const int64_t place = view.strides == nullptr ? i : i * view.strides[0];
  return view.dtype.bits == 64 ? reinterpret_cast<const int64_t*>(data)[place]
                               : reinterpret_cast<const int32_t*>(data)[place];
}

bool boundaries_hold(const TensorView& view, int64_t tokens) {
  const int64_t count = view.shape[0];
  if (view.dtype.code != kSignedInteger || (view.dtype.bits != 32 && view.dtype.bits != 64)) return false;
  if (count == 0 || entry(view, 0) != 0) return false;
  for (int64_t i = 1; i < count; ++i) {
    if (entry(view, i) < entry(view, i - 1)) return false;
  }
  return entry(view, count - 1) <= tokens;
}

bool same_boundaries(const TensorView& a, const TensorView& b) {
  if (a.shape[0] != b.shape[0]) return false;
  for (int64_t i = 0; i < a.shape[0]; ++i) {
    if (entry(a, i) != entry(b, i)) return false;
  }
  return true;
}

bool check_sequences(Reading& reading) {
  int64_t* sizes = reading.sizes;
  if (!reading.has_packed) {
    if (reading.has_host_copy) return false;
    if (sizes[kN] >= 0 && sizes[kB] >= 0 && sizes[kN] != sizes[kB]) return false;
    if (sizes[kB] >= 0) sizes[kN] = sizes[kB];
    return true;
  }
  if (sizes[kB] != 1) return false;
  const bool on_host = reading.packed.device.type == kCpu;
  if (on_host && reading.device.type != kCpu) return false;  // to be moved first
  if (reading.has_host_copy) {
    if (reading.host_copy.device.type != kCpu || !boundaries_hold(reading.host_copy, sizes[kT])) return false;
    return !on_host || (boundaries_hold(reading.packed, sizes[kT]) && same_boundaries(reading.packed, reading.host_copy));
  }
  return !on_host || boundaries_hold(reading.packed, sizes[kT]);
}

// -1: doubt; 0 or 1: the answer.
int ask(PyObject* function) {
  PyObject* answer = PyObject_CallNoArgs(function);
  if (answer == nullptr) {
    PyErr_Clear();
    return -1;
  }
  Py_DECREF(answer);
  return answer == Py_True;
}

// 1: needs gradients; 2: inference mode; 0: neither. -1: doubt.
int read_mode(Operator* self, Values& values) {
  const Environment& env = environment();
  const int grad = ask(env.is_grad_enabled);
  if (grad < 0) return -1;
  if (grad) {
    const auto& parameters = *self->parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
      PyObject* value = values[i];
      if (!parameters[i].differentiable || value == Py_None) continue;
      PyObject* requires_grad = env.requires_grad->get(value, env.requires_grad->closure);
      if (requires_grad == nullptr) {
        PyErr_Clear();
        return -1;
      }
      Py_DECREF(requires_grad);
      if (requires_grad == Py_True) return 1;
    }
    return 0;
  }
  const int inference = ask(env.is_inference);
  return inference < 0 ? -1 : 2 * inference;
}

bool read_text(const char* text, Py_ssize_t length, size_t& room, Key& key) {
  const size_t words = 1 + (static_cast<size_t>(length) + 7) / 8;
  if (words > room) return false;
  room -= words;
  key.add(text, length);
  return true;
}

bool read_gates(Key& key) {
  const Environment& env = environment();
  size_t room = kGateRoom;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(env.gates); ++i) {
    PyObject* value = PyDict_GetItemWithError(env.variables, PyTuple_GET_ITEM(env.gates, i));
    if (value == nullptr) {
      if (PyErr_Occurred() || room-- == 0) {
        PyErr_Clear();
        return false;
      }
      key.add(~0ull);
    } else if (!read_text(PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value), room, key)) {
      return false;
    }
  }
  PyObject* forced = nullptr;
  if (PyContextVar_Get(env.forced_backend, nullptr, &forced) != 0) {
    PyErr_Clear();
    return false;
  }
  bool known = true;
  if (forced != nullptr && forced != Py_None) {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_CheckExact(forced) ? PyUnicode_AsUTF8AndSize(forced, &length) : nullptr;
    if (text == nullptr) PyErr_Clear();
    known = text != nullptr && read_text(text, length, room, key);
  }
  Py_XDECREF(forced);
  return known;
}

bool read(Operator* self, Values& values, Reading& reading) {
  const auto& parameters = *self->parameters;
  uint64_t bits = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const bool clear = parameter.kind == Kind::kTensor ? read_tensor(parameter, values[i], i, self, reading)
                                                       : read_option(parameter, values, i, bits, reading.key);
    if (!clear) return false;
    if (i % 32 == 31) {
      reading.key.add(bits);
      bits = 0;
    }
  }
  reading.key.add(bits);
  if (!check_sequences(reading)) return false;
  const int mode = read_mode(self, values);
  if (mode < 0) return false;
  const uint64_t B = reading.sizes[kB] < 0 ? 1 : reading.sizes[kB], T = reading.sizes[kT] < 0 ? 1 : reading.sizes[kT];
  const uint64_t N = reading.sizes[kN] < 0 ? 0 : reading.sizes[kN];
  reading.key.add(static_cast<uint64_t>(mode) << 32 | bit_length(B * T) << 16 | bit_length(N));
  return read_gates(reading.key);
}

// Calls plan_for(gate names, gate values, forced backend, *values). Python decides by the gates the key was made of, not
// by those of a moment later; no Python code runs between reading them there and collecting them here.
PyObject* ask_for_plan(Operator* self, PyObject* const* args) {
  const Environment& env = environment();
  const Py_ssize_t gates = PyTuple_GET_SIZE(env.gates), count = static_cast<Py_ssize_t>(self->parameters->size());
  std::vector<PyObject*> found(gates, Py_None);
  for (Py_ssize_t i = 0; i < gates; ++i) {
    PyObject* value = PyDict_GetItemWithError(env.variables, PyTuple_GET_ITEM(env.gates, i));
    if (value != nullptr) found[i] = value;
    Py_INCREF(found[i]);
  }
  PyObject* forced = nullptr;
  PyContextVar_Get(env.forced_backend, nullptr, &forced);
  PyObject* values = PyTuple_New(gates);
  for (Py_ssize_t i = 0; i < gates; ++i) {
    if (values == nullptr) Py_DECREF(found[i]);
    if (values != nullptr) PyTuple_SET_ITEM(values, i, found[i]);
  }
  PyObject* plan = nullptr;
  if (values != nullptr && !PyErr_Occurred()) {
    PyObject* given[kMaxParameters + 3] = {env.gates, values, forced == nullptr ? Py_None : forced};
    std::memcpy(given + 3, args, sizeof(PyObject*) * count);
    plan = PyObject_Vectorcall(self->plan_for, given, count + 3, nullptr);
  }
  Py_XDECREF(values);
  Py_XDECREF(forced);
  return plan;
}

// Asks Python for the plan and remembers it. Returns null with an exception set, or with none where the decision is not
// to be remembered.
Decision* learn(Operator* self, PyObject* const* args, uint64_t hash, const Key& key) {
  const Environment& env = environment();
  const uint64_t generation = self->generation;
  PyObject* plan = ask_for_plan(self, args);
  if (plan == nullptr || plan == Py_None || self->generation != generation) {  // a registration came in between
    Py_XDECREF(plan);
    return nullptr;
  }
  PyObject* run = PyObject_GetAttr(plan, env.plan_forward);
  const bool forward = run != nullptr && run != Py_None;
  if (!forward) {
    Py_XDECREF(run);
    run = PyObject_GetAttr(plan, env.plan_run);
  }
  Decision decision{key.words(), plan, run, forward, PyObject_GetAttr(plan, env.plan_route), {}};
  PyObject* derived = PyObject_GetAttr(plan, env.plan_derived);
  if (decision.run == nullptr || decision.route == nullptr || derived == nullptr) {
    Py_XDECREF(decision.run);
    Py_XDECREF(decision.route);
    Py_XDECREF(derived);
    Py_DECREF(plan);
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(derived); ++i) {
    PyObject* pair = PyTuple_GET_ITEM(derived, i);
    PyObject* value = PyTuple_GET_ITEM(pair, 1);
    Py_INCREF(value);
    decision.derived.emplace_back(PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 0)), value);
  }
  Py_DECREF(derived);
  Cache retired;  // released last: a destructor may call back into Python
  if (self->cache->size() >= kMaxDecisions) retired.swap(*self->cache);
  auto [place, fresh] = self->cache->try_emplace(hash, decision);
  if (!fresh) {
    std::swap(place->second, decision);
    retired.emplace(hash, std::move(decision));
  }
  for (auto& item : retired) item.second.release();
  auto found = self->cache->find(hash);
  return found == self->cache->end() ? nullptr : &found->second;
}

// Steals the pair, returns a new reference to its first half.
PyObject* first_of(PyObject* pair) {
  PyObject* first = PySequence_GetItem(pair, 0);
  Py_DECREF(pair);
  return first;
}

PyObject* hand_over(Operator* self, Decision* decision, Values& values, const Reading& reading) {
  const Environment& env = environment();
  // Held across calls into Python, which may empty the cache.
  PyObject *plan = decision->plan, *run = decision->run, *route = decision->route;
  const bool forward = decision->forward;
  Py_INCREF(plan);
  Py_INCREF(run);
  Py_INCREF(route);
  for (auto& [position, value] : decision->derived) {
    if (values[position] == Py_None) {
      Py_INCREF(value);
      values.replace(position, value);
    }
  }
  bool bound = true;
  for (size_t i = 0; reading.any_strided && bound && i < self->parameters->size(); ++i) {
    if (!reading.strided[i]) continue;
    PyObject* contiguous = PyObject_CallOneArg(env.plain, values[i]);
    bound = contiguous != nullptr;
    if (bound) values.replace(i, contiguous);
  }
  PyObject *tuple = bound ? values.tuple() : nullptr, *result = nullptr;
  PyObject* call = tuple == nullptr ? nullptr : make_bound_call(self->call_type, plan, tuple);
  if (call != nullptr) {
    note_route(route);
    result = PyObject_CallOneArg(run, call);
    if (forward && result != nullptr) result = first_of(result);
    Py_DECREF(call);
  }
  Py_DECREF(plan);
  Py_DECREF(run);
  Py_DECREF(route);
  return result;
}

PyObject* call_operator(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  auto* self = reinterpret_cast<Operator*>(object);
  const Py_ssize_t count = static_cast<Py_ssize_t>(self->parameters->size());
  if (PyVectorcall_NARGS(nargsf) != count || kwnames != nullptr) {
    return PyErr_Format(PyExc_TypeError, "the compiled path takes exactly %zd values in order", count);
  }
  Values values(args, count);
  Reading reading;
  if (read(self, values, reading)) {
    const uint64_t hash = reading.key.hash();
    auto found = self->cache->find(hash);
    Decision* decision = found != self->cache->end() && reading.key.equals(found->second.key) ? &found->second : nullptr;
    if (decision == nullptr) {
      decision = learn(self, args, hash, reading.key);
      if (decision == nullptr && PyErr_Occurred()) return nullptr;
    }
    if (decision != nullptr) return hand_over(self, decision, values, reading);
  }
  return PyObject_Vectorcall(self->slow, args, count, nullptr);
}

// --- construction from Python's table --------------------------------------------------------------------------------

bool read_axes(PyObject* shape, std::vector<Axis>& axes) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(shape); ++i) {
    PyObject* axis = PyTuple_GetItem(shape, i);
    if (axis == Py_None) {
      axes.push_back({kStatic, 0});
      continue;
    }
    const char* letter;
    long long offset;
    if (!PyArg_ParseTuple(axis, "sL", &letter, &offset)) return false;
    const char* known = std::strchr("BTN", letter[0]);
    if (known == nullptr || letter[1] != '\0') {
      PyErr_Format(PyExc_ValueError, "the compiled path does not know the varying size %s", letter);
      return false;
    }
    axes.push_back({static_cast<Letter>(known - "BTN"), offset});
  }
  return !PyErr_Occurred();
}

bool read_parameter(PyObject* item, std::vector<Parameter>& parameters) {
  const char* kind;
  int optional, differentiable = 0;
  PyObject* shapes = nullptr;
  if (!PyArg_ParseTuple(item, "sp|O!p", &kind, &optional, &PyTuple_Type, &shapes, &differentiable)) return false;
  Parameter& parameter = parameters.emplace_back();
  parameter.optional = optional != 0;
  parameter.differentiable = differentiable != 0;
  const std::string name = kind;
  if (name == "tensor") parameter.kind = Kind::kTensor;
  if (name == "bool") parameter.kind = Kind::kBool;
  if (name == "int") parameter.kind = Kind::kInt;
  if (name == "float") parameter.kind = Kind::kFloat;
  if (name == "dtype") parameter.kind = Kind::kDtype;
  for (Py_ssize_t i = 0; shapes != nullptr && i < PyTuple_GET_SIZE(shapes); ++i) {
    if (!read_axes(PyTuple_GET_ITEM(shapes, i), parameter.shapes.emplace_back())) return false;
  }
  return true;
}

PyObject* construct(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject *kinds, *call_type, *plan, *slow;
  Py_ssize_t packed, host_copy;
  static const char* keywords[] = {"kinds", "packed", "host_copy", "call_type", "plan", "slow", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!nnO!OO", const_cast<char**>(keywords), &PyTuple_Type, &kinds,
                                   &packed, &host_copy, &PyType_Type, &call_type, &plan, &slow)) {
    return nullptr;
  }
  std::vector<Parameter> parameters;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); ++i) {
    if (!read_parameter(PyTuple_GET_ITEM(kinds, i), parameters)) return nullptr;
  }
  if (parameters.size() > kMaxParameters) {
    return PyErr_Format(PyExc_ValueError, "an operator has at most %d parameters", kMaxParameters);
  }
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) return nullptr;
  auto* self = reinterpret_cast<Operator*>(object);
  self->vectorcall = call_operator;
  self->parameters = new std::vector<Parameter>(std::move(parameters));
  self->packed = packed;
  self->host_copy = host_copy;
  for (PyObject* held : {call_type, plan, slow}) Py_INCREF(held);
  self->call_type = reinterpret_cast<PyTypeObject*>(call_type);
  self->plan_for = plan;
  self->slow = slow;
  self->cache = new Cache();
  return object;
}

PyObject* forget(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Operator*>(object);
  Cache retired;
  retired.swap(*self->cache);
  ++self->generation;
  for (auto& item : retired) item.second.release();
  Py_RETURN_NONE;
}

PyObject* cached(PyObject* object, PyObject*) {
  return PyLong_FromSize_t(reinterpret_cast<Operator*>(object)->cache->size());
}

void destroy(PyObject* object) {
  auto* self = reinterpret_cast<Operator*>(object);
  PyTypeObject* type = Py_TYPE(object);
  for (auto& item : *self->cache) item.second.release();
  delete self->cache;
  delete self->parameters;
  Py_DECREF(self->call_type);
  Py_DECREF(self->plan_for);
  Py_DECREF(self->slow);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"forget", forget, METH_NOARGS, "Drop every cached decision."},
    {"cached", cached, METH_NOARGS, "How many decisions are cached."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Operator, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(construct)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("The compiled front of one declared operator.")},
    {0, nullptr},
};

PyType_Spec spec = {"fla_dispatch._registry.Operator", sizeof(Operator), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};

// Borrowed from the dict of the thread's state, which lets go of it when the thread ends.
thread_local PyObject* route_of_thread = nullptr;

}  // namespace

Environment& environment() {
  static Environment instance;
  return instance;
}

PyObject* make_operator_type() { return PyType_FromSpec(&spec); }

void note_route(PyObject* route) {
  if (route == route_of_thread) return;
  static PyObject* const key = PyUnicode_InternFromString("fla_dispatch.route");
  PyObject* state = PyThreadState_GetDict();
  if (state == nullptr || PyDict_SetItem(state, key, route) != 0) {
    PyErr_Clear();
    return;
  }
  route_of_thread = route;
}

PyObject* last_route() {
  PyObject* route = route_of_thread == nullptr ? Py_None : route_of_thread;
  Py_INCREF(route);
  return route;
}

}  // namespace fla
