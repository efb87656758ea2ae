package pod_test

import (
	"testing"

	"gpu-cdi-plugin/manager/pod"
	"gpu-cdi-plugin/test/lib/hostileyaml"
)

func TestHostileManifests(t *testing.T) {
	hostileyaml.Check(t, "kind", "spec", func(data []byte) error {
		_, err := pod.Parse(data)
		return err
	})
}
