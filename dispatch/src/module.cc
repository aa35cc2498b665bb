// fla_dispatch._registry: the compiled path from a call to the plan that runs it.
#include <pybind11/pybind11.h>

#include "bound_call.h"
#include "operator.h"

namespace py = pybind11;

namespace {

const fla::ExchangeApi* exchange_api(const py::capsule& capsule) {
  auto* api = static_cast<const fla::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), PyCapsule_GetName(capsule.ptr())));
  if (api == nullptr) throw py::error_already_set();
  return api;
}

PyObject* hold(const py::object& object) { return py::object(object).release().ptr(); }

// Tell the compiled path about torch and the process. False: this torch is not as expected.
bool configure(const py::capsule& api, const py::object& tensor, const py::object& parameter, const py::object& dtype,
               const py::object& requires_grad, const py::object& is_grad_enabled, const py::object& is_inference, const py::dict& variables,
               const py::object& forced_backend, const py::object& plain) {
  fla::Environment& env = fla::environment();
  env.api = exchange_api(api);
  if (env.api->major != fla::kExchangeMajor) return false;
  if (!py::isinstance(requires_grad, py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&PyGetSetDescr_Type)))) return false;
  env.requires_grad = reinterpret_cast<PyGetSetDescrObject*>(hold(requires_grad))->d_getset;
  env.tensor = hold(tensor);
  env.parameter = hold(parameter);
  env.dtype = hold(dtype);
  env.is_grad_enabled = hold(is_grad_enabled);
  env.is_inference = hold(is_inference);
  env.variables = hold(variables);
  env.forced_backend = hold(forced_backend);
  env.plain = hold(plain);
  env.gates = hold(py::tuple());
  env.plan_forward = PyUnicode_InternFromString("forward");
  env.plan_run = PyUnicode_InternFromString("run");
  env.plan_route = PyUnicode_InternFromString("route");
  env.plan_derived = PyUnicode_InternFromString("derived");
  return true;
}

void set_gates(const py::tuple& gates) {
  for (const py::handle gate : gates) {
    if (!PyBytes_CheckExact(gate.ptr())) throw py::type_error("gates are names as bytes");
  }
  py::object before = py::reinterpret_steal<py::object>(fla::environment().gates);
  fla::environment().gates = hold(gates);
}

}  // namespace

PYBIND11_MODULE(_registry, m) {
  m.doc() = "The compiled path from a call to the plan that runs it.";
  m.attr("BoundCall") = py::reinterpret_steal<py::object>(fla::make_bound_call_type());
  m.attr("Operator") = py::reinterpret_steal<py::object>(fla::make_operator_type());
  m.def("configure", &configure, "Tell the compiled path about torch and the process; False if they do not fit.");
  m.def("set_gates", &set_gates, "Name the environment variables (as bytes) that can change a decision.");
  m.def("note_route", [](const py::object& route) { fla::note_route(route.ptr()); });
  m.def("last_route", [] { return py::reinterpret_steal<py::object>(fla::last_route()); },
        "The route of this thread's last call, or None.");
}
