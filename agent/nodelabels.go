package agent

import (
	"errors"
	"io/fs"
	"os"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/labels"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// writeLabels writes the labels of a state, if the configuration wants them. The file stays as it is while the driver
// cannot be read, and when the program ends: a node must not lose its labels while the driver or this program is
// replaced.
func (ds *devices) writeLabels(state *node.State) error {
	c := ds.config.Load()
	known := state.Snapshot != nil && (len(state.Snapshot.Devices) > 0 || state.Err == nil)
	if !c.NodeLabels || !known {
		return nil
	}
	// While specs are written, the state has fewer resources.
	resources, _, err := resource.Build(state.Snapshot, c.Config)
	if err != nil {
		return err
	}
	n := labels.Node{
		Snapshot: state.Snapshot, Resources: resources, Config: c.Config,
		Machine: host.ReadLine(ds.host.Sys("class", "dmi", "id", "product_name")),
	}
	return labels.WriteFile(LabelsFile(c), n.Labels())
}

// RemoveLabels removes the file with the node's labels, and returns its path, or "" if it does not exist. In a
// directory that other users can change, it returns an error: the file may be one of theirs.
func RemoveLabels(c *config.Config, trust Trust) (string, error) {
	path := LabelsFile(c)
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err := trust.CheckDir("features-dir", c.FeaturesDir); err != nil {
		return "", err
	}
	return path, labels.RemoveFile(path)
}
