#include "bound_call.h"

#include <structmember.h>

namespace fla {
namespace {

PyObject* construct(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject *plan, *values;
  static const char* names[] = {"plan", "values", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!", const_cast<char**>(names), &plan, &PyTuple_Type, &values)) {
    return nullptr;
  }
  Py_INCREF(values);
  return make_bound_call(type, plan, values);
}

void destroy(PyObject* object) {
  auto* call = reinterpret_cast<BoundCall*>(object);
  PyTypeObject* type = Py_TYPE(object);
  Py_CLEAR(call->plan);
  Py_CLEAR(call->values);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMemberDef members[] = {
    {"plan", T_OBJECT_EX, offsetof(BoundCall, plan), READONLY, "the decision this call shares with its like"},
    {"values", T_OBJECT_EX, offsetof(BoundCall, values), READONLY, "one value per parameter"},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(construct)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("A plan and the values bound to it.")},
    {0, nullptr},
};

PyType_Spec spec = {"fla_dispatch._registry.BoundCall", sizeof(BoundCall), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                    slots};

}  // namespace

PyObject* make_bound_call_type() { return PyType_FromSpec(&spec); }

PyObject* make_bound_call(PyTypeObject* type, PyObject* plan, PyObject* values) {
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) {
    Py_DECREF(values);
    return nullptr;
  }
  auto* call = reinterpret_cast<BoundCall*>(object);
  Py_INCREF(plan);
  call->plan = plan;
  call->values = values;
  return object;
}

}  // namespace fla
