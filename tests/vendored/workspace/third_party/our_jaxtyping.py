"""Found only where fla depends on //third_party:jaxtyping."""
