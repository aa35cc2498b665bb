"""pip_repository: one external repository per environment, one py_library per distribution."""

def _pip_repository_impl(ctx):
    locks = {ctx.path(lock).basename.removesuffix(".lock"): lock for lock in ctx.attr.locks}
    arguments = []
    if ctx.attr.choose:
        forced = ctx.os.environ.get(ctx.attr.choose_env, "")
        if forced:
            if forced not in locks:
                fail("%s=%s: must be one of %s" % (ctx.attr.choose_env, forced, ", ".join(locks)))
            locks = {forced: locks[forced]}
        arguments = ["--choose", ctx.attr.choose]
    ctx.report_progress("installing " + " or ".join(locks))
    result = ctx.execute(
        [ctx.path(ctx.attr.interpreter), ctx.path(ctx.attr._installer), "."] + arguments + [ctx.path(lock) for lock in locks.values()],
        environment = {"PYTHONPATH": "", "PYTHONHOME": ""},
        timeout = 3600,
        quiet = False,  # the installer says how far it is
    )
    if result.return_code:
        fail(result.stderr)

pip_repository = repository_rule(
    implementation = _pip_repository_impl,
    doc = "Installs a hash-locked environment with the pip of `interpreter`. Several locks are alternatives, best first.",
    attrs = {
        "locks": attr.label_list(mandatory = True, allow_files = [".lock"]),
        "choose": attr.string(doc = "The distribution whose wheel decides between several locks."),
        "choose_env": attr.string(doc = "Environment variable that names the lock instead (--repo_env=NAME=lock)."),
        "interpreter": attr.label(default = Label("@fla_python//:env/bin/python")),
        "_installer": attr.label(default = Label("//tools/pip:install.py")),
    },
    environ = ["FLA_TORCH", "PIP_CONFIG_FILE", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_NO_INDEX"],
)
