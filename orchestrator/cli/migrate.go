package cli

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"holdfast/migrations"
	"holdfast/orchestrator/config"
)

func newMigrate() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate [up|down|status]",
		Short: "Bring the database's schema to this version, one step back, or show where it is",
		Long: `Applies the numbered migrations that this binary carries. "up" (the default) applies
all that are missing, "down" takes the latest one back together with its data, "status"
lists them. serve refuses to start on a schema of another version.`,
		Args:      cobra.MatchAll(cobra.MaximumNArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{"up", "down", "status"},
	}
	flags := addConfigFlags(cmd, config.Default(), databaseFlags)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cfg, err := flags.load((*config.Config).ValidateDatabase)
		if err != nil {
			return err
		}
		action := "up"
		if len(args) == 1 {
			action = args[0]
		}
		switch action {
		case "up":
			err = migrations.Up(cmd.Context(), cfg.Database.URL)
		case "down":
			err = migrations.Down(cmd.Context(), cfg.Database.URL)
		}
		if err != nil {
			return err
		}
		status, err := migrations.Status(cmd.Context(), cfg.Database.URL)
		if err != nil {
			return err
		}
		for _, step := range status {
			state := "not applied"
			if step.Applied {
				state = "applied " + step.AppliedAt.UTC().Format(time.RFC3339)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%05d  %-40s %s\n", step.Version, step.Name, state)
		}
		return nil
	}
	return cmd
}
