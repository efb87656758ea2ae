package config

import (
	"testing"

	"gpu-cdi-plugin/test/lib/hostileyaml"
)

func TestHostileConfigurations(t *testing.T) {
	hostileyaml.Check(t, "root", "health", func(data []byte) error {
		_, err := Keys.Parse(data, new(Default()))
		return err
	})
}
