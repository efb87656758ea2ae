package inject

import (
	"testing"

	"gpu-cdi-plugin/test/lib/hostileyaml"
)

func TestHostilePolicies(t *testing.T) {
	hostileyaml.Check(t, "log", "rules", func(data []byte) error {
		_, err := parsePolicy(data)
		return err
	})
}
