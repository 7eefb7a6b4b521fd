package weights

import (
	"strconv"

	"holdfast/router"
)

// Label is what is to be taken for the weights that generated a whole result,
// empty if that cannot be said. Engines whose weights are named by nobody, or by a
// name that nobody keeps up, have the version that is known here; one that names
// others than it did last has changed unasked, and knows better.
func (c *Coordinator) Label(id router.InstanceID, pass Pass, label string) string {
	c.Noticed(id, label)
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.members[id]
	switch {
	case m == nil || m.version != pass.PolicyVersion || m.version == 0:
		return label
	case label == "" || m.labeled && m.label == label:
		return strconv.FormatInt(m.version, 10)
	}
	return label
}
