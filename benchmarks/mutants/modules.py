"""Which quick tests are asked to notice a slip in which module; paths from ``src`` and from ``tests``."""

from __future__ import annotations

_CHECKS = [
    f"results/test_checks.py::{name}"
    for name in (
        "test_a_healthy_result_has_no_problem",
        "test_colours_change_at_their_borders",
        "test_errors_of_sds_count_for_both_signs",
        "test_few_draws_one_chain_and_an_early_end",
        "test_what_is_no_number_or_missing_is_red",
        "test_columns_and_values_are_named_with_counts",
        "test_a_prior_that_decides_alone_needs_care",
        "test_sites_that_are_silent_seldom_or_late",
        "test_fit_of_the_model",
        "test_outcomes_of_a_site",
        "test_verdict_modes_and_target",
        "test_without_rows_the_checks_of_rows_say_that_they_were_not_made",
    )
]

_CLASSES = [
    "privacy/test_privacy_composition.py::test_classes_of_draws_keep_the_probability_and_round_up",
]

_ANCHORS = [
    f"privacy/test_privacy_steps.py::{name}"
    for name in (
        "test_profiles_far_out_are_those_of_logarithms",
        "test_few_multipliers_are_kept_and_many_are_covered",
    )
]
_STEPS = "privacy/test_privacy_steps.py"
_SEARCHES = [
    f"{_STEPS}::{name}"
    for name in (
        "test_the_largest_correlation_step_and_rounds_keep_the_budget_and_no_more",
        "test_a_run_of_another_length_has_digits_of_its_own",
        "test_where_no_number_of_participants_will_do_the_least_epsilon_is_told",
        "test_rounds_are_looked_for_farther_and_farther",
        "test_a_step_is_not_looked_for_far_beyond_its_limit",
        "test_a_step_is_found_from_wherever_the_search_begins",
        "test_a_correlation_is_found_in_the_factor_of_the_noise",
        "test_the_most_participants_are_found_from_above",
        "test_budgets_have_ranges",
        "test_searches_refuse_what_they_cannot_do",
    )
]
_RENYI = [
    f"{_STEPS}::{name}"
    for name in (
        "test_orders_above_the_theorem_are_integrated",
        "test_renyi_steps_on_all_rows_are_closed_forms",
        "test_the_orders_reach_as_far_as_small_losses_need_them",
        "test_on_all_rows_every_multiplier_is_charged_as_it_is",
        "test_orders_near_the_best_give_what_all_orders_give",
        "test_multipliers_are_rounded_down_onto_a_grid",
        "test_poisson_needs_a_norm_only_where_there_are_batches",
    )
]
_SLOWLY = "privacy/test_privacy_combinations.py::test_epsilon_is_that_of_the_slow_sum_and_never_below_it"
_REFUSED = [
    f"privacy/test_privacy_refusals.py::{name}"
    for name in (
        "test_options_out_of_range",
        "test_realised_participation_needs_the_table",
        "test_shuffled_batches_and_poisson_without_a_norm",
    )
]

_GAUSSIAN = [
    f"theory/test_gaussian.py::{name}"
    for name in (
        "test_law_equals_enumeration_with_a_step_that_varies_inside_a_round",
        "test_steps_summed_in_parts_give_the_same_law",
        "test_what_is_not_given_is_the_default",
        "test_bad_input_is_named",
        "test_bad_distances_are_named",
        "test_divergence_is_named",
        "test_target_is_the_minimiser_with_the_inverse_curvature",
        "test_wasserstein_equals_the_bures_formula",
        "test_stationary_law_is_the_limit_and_a_fixed_point",
    )
]

_SAFETY = [
    f"langevin/test_safety.py::{name}"
    for name in (
        "test_settings_have_bounds_and_the_borders_are_inside",
        "test_a_schedule_is_accounted_at_its_step",
        "test_what_noise_is_added_to_is_the_parameter_or_the_step_of_the_prior",
        "test_the_accounted_sd_is_that_of_the_formula",
        "test_noise_must_span_so_many_of_the_last_digits",
        "test_a_little_more_or_less_noise_than_accounted_is_seen",
        "test_other_steps_have_other_noise_of_their_own_part_alone",
        "test_noise_is_measured_on_what_is_added",
        "test_settings_are_accounted_as_the_sampler_has_them",
    )
]

_SCHEDULES = [
    f"settings/test_schedules.py::{name}"
    for name in (
        "test_values",
        "test_schedules_are_their_formulas",
        "test_every_step_of_a_scaled_schedule_is_so_many_times_as_large",
        "test_numbers_are_scaled_and_functions_are_not",
        "test_numbers_out_of_range_are_refused",
        "test_records_are_plain_and_come_back",
        "test_numbers_can_be_taken_out_of_a_schedule_and_not_out_of_a_function",
        "test_what_is_no_schedule_is_refused",
        "test_equal_functions_are_those_with_the_same_code_and_values",
        "test_functions_that_see_what_may_change_are_equal_to_themselves_alone",
    )
] + [f"langevin/test_phases.py::{name}" for name in ("test_steps_of_phases", "test_refusals")]

_FRONT = [
    f"planner/test_planner.py::{name}"
    for name in (
        "test_privacy_loss_grows_with_what_reveals_more",
        "test_privacy_loss_of_a_client_that_is_drawn_every_time",
        "test_privacy_loss_is_that_of_the_accountants_multipliers",
    )
]

_COSTS = [
    f"langevin/test_client_parts.py::{name}"
    for name in (
        "test_where_all_take_part_rounds_say_what_a_run_has_cost",
        "test_drawn_clients_pay_for_the_rounds_they_took_part_in",
        "test_what_uploads_say_is_summed_beyond_one_word",
        "test_drawn_clients_pay_for_their_preparation_and_the_server_waits_in_every_round",
        "test_the_server_of_all_clients_waits_where_some_client_was_asked",
        "test_counters_begin_at_zero_for_every_client_and_chain",
        "test_a_sum_that_fills_a_word_to_its_end_goes_on_in_the_next",
    )
]

_BATCHES = [
    f"calculus/test_batches.py::{name}"
    for name in (
        "test_choices_of_the_generator_map_one_to_one_to_outcomes",
        "test_batch_holds_distinct_rows_of_its_client",
        "test_client_smaller_than_the_batch_is_taken_whole",
        "test_steps_and_keys_choose_anew",
        "test_what_no_population_exceeds_changes_no_index",
        "test_last_equal_in_one_word_and_in_two",
        "test_values_too_large_for_one_word_are_not_packed",
    )
]

_SEARCH = ["fewround/test_search_by_hand.py", "fewround/test_parts.py"]

TESTS: dict[str, list[str]] = {
    "fald/federation/wire.py": ["federation/test_wire.py"],
    "fald/federation/site/policy.py": ["federation/test_policy.py", "federation/test_budget_borders.py"],
    "fald/federation/site/worker.py": ["federation/test_site_worker.py"],
    "fald/federation/site/run.py": ["federation/test_site_rounds.py"],
    "fald/federation/site/langevin.py": [
        "federation/test_site_run.py::test_memory_is_that_before_the_round_whoever_asks_again",
        "federation/test_site_table.py::test_messages_of_a_round_must_fit_the_study",
        "federation/test_site_table.py::test_uploads_are_compared_with_what_the_method_declares",
        "federation/test_site_steps.py",
    ],
    "fald/core/reveals.py": ["core/test_reveals.py"],
    "fald/federation/site/messages.py": ["federation/test_messages.py"],
    "fald/federation/site/opening.py": ["federation/test_opening.py"],
    "fald/federation/site/answers.py": ["federation/test_answers.py"],
    "fald/federation/site/audit.py": ["federation/test_audit.py"],
    "fald/federation/site/record.py": ["federation/test_record.py"],
    "fald/federation/site/confined.py": ["federation/test_process.py"],
    "fald/federation/site/ledger.py": ["federation/test_budget_borders.py", "federation/test_ledger.py"],
    "fald/federation/site/account.py": ["federation/test_account.py"],
    "fald/federation/secure/session.py": ["federation/test_budget_borders.py", "federation/test_secure.py"],
    "fald/federation/secure/shares.py": ["federation/test_shares.py"],
    "fald/federation/secure/fixed_point.py": [
        "federation/test_budget_borders.py",
        "federation/test_secure.py",
    ],
    "fald/federation/secure/identity.py": ["federation/test_budget_borders.py", "federation/test_secure.py"],
    "fald/fewround/certify.py": ["fewround/test_certify_borders.py", "fewround/test_certify.py"],
    "fald/fewround/chains.py": ["fewround/test_chain_checks.py"],
    "fald/fewround/learned.py": ["fewround/test_learned.py", "fewround/test_learned_parts.py"],
    "fald/fewround/rays.py": ["fewround/test_rays.py"],
    "fald/fewround/rounding.py": ["fewround/test_rounding.py"],
    "fald/fewround/weights.py": ["fewround/test_weights.py"],
    "fald/fewround/explorers.py": _SEARCH,
    "fald/fewround/proposal.py": _SEARCH,
    "fald/fewround/search.py": _SEARCH,
    "fald/fewround/target.py": _SEARCH,
    "fald/fewround/site.py": ["fewround/test_requests.py", *_SEARCH],
    "fald/fewround/steps.py": ["fewround/test_steps.py"],
    "fald/problem/encoding.py": ["problem/test_data.py"],
    "fald/problem/partition.py": ["problem/test_partition.py"],
    "fald/results/columns.py": ["results/test_checks.py"],
    "fald/results/diagnostics.py": ["results/test_diagnostics.py"],
    "fald/results/predict.py": ["results/test_predict.py"],
    "fald/results/prior.py": ["results/test_checks.py"],
    "fald/results/probabilities.py": [
        "results/test_sinks.py",
        "results/test_predict.py::test_probabilities_from_fewer_draws_come_from_all_chains",
    ],
    "fald/results/sinks.py": ["results/test_sinks.py"],
    "fald/results/summary.py": [
        "runtime/test_journal.py::test_the_intervals_and_r_hat_of_the_journal_are_those_of_the_draws",
        "results/test_results.py",
    ],
    "fald/results/checks_of_draws.py": ["results/test_check_borders.py", *_CHECKS],
    "fald/results/checks_of_model.py": ["results/test_check_borders.py", *_CHECKS],
    "fald/results/examine.py": ["results/test_examined.py"],
    "fald/results/predictive.py": ["results/test_predictive.py"],
    "fald/results/judgement.py": ["results/test_check_borders.py", *_CHECKS],
    "fald/core/checks.py": ["settings/test_fald_settings.py"],
    "fald/settings/fald.py": ["settings/test_fald_settings.py"],
    "fald/settings/participation.py": ["settings/test_participation.py"],
    "fald/settings/schedules.py": _SCHEDULES,
    "fald/langevin/method.py": ["langevin/test_local_parts.py"],
    "fald/langevin/fald.py": ["langevin/test_local_parts.py"],
    "fald/langevin/client.py": ["langevin/test_client_parts.py"],
    "fald/langevin/compressors.py": ["langevin/test_compressors.py"],
    "fald/langevin/costs.py": _COSTS,
    "fald/langevin/noise.py": ["langevin/test_local_parts.py"],
    "fald/langevin/server.py": ["langevin/test_local_parts.py"],
    "fald/langevin/safety.py": _SAFETY,
    "fald/langevin/rounds.py": ["langevin/test_rounds.py"],
    "fald/langevin/reading.py": ["langevin/test_reading.py"],
    "fald/langevin/guard.py": ["langevin/test_guard.py"],
    "fald/privacy/accountant.py": [_STEPS, *_REFUSED],
    "fald/privacy/events.py": ["privacy/test_privacy_parts.py", *_CLASSES],
    "fald/privacy/rounds.py": ["privacy/test_privacy_parts.py"],
    "fald/privacy/compose.py": ["privacy/test_privacy_parts.py"],
    "fald/privacy/settings.py": ["privacy/test_privacy_parts.py"],
    "fald/privacy/pld.py": ["privacy/test_pld_parts.py", "privacy/test_privacy_profile.py", *_ANCHORS],
    "fald/privacy/rdp.py": [*_RENYI, _SLOWLY],
    "fald/privacy/calibration.py": _SEARCHES,
    "fald/privacy/paper.py": ["privacy/test_privacy_paper.py", "privacy/test_privacy_forms.py"],
    "fald/runtime/checkpoint.py": ["runtime/test_store.py"],
    "fald/theory/bounds.py": ["theory/test_bounds_by_hand.py"],
    "fald/theory/complexity.py": ["theory/test_lemmas_by_hand.py"],
    "fald/theory/lemmas.py": ["theory/test_lemmas_by_hand.py"],
    "fald/theory/measured.py": ["theory/test_constants.py"],
    "fald/theory/gaussian.py": ["theory/test_gaussian_parts.py", *_GAUSSIAN],
    "fald/planner/law.py": [
        "planner/test_law_parts.py",
        "planner/test_planner.py::test_every_round_is_that_of_the_exact_law",
        "planner/test_planner.py::test_the_start_is_known_where_one_step_forgets_it",
    ],
    "fald/planner/predict.py": ["planner/test_predict_borders.py", "planner/test_predict_parts.py"],
    "fald/planner/front.py": [
        "planner/test_predict_borders.py",
        "planner/test_predict_parts.py",
        *_FRONT,
    ],
    "fald/planner/checks.py": ["planner/test_predict_parts.py"],
    "fald/planner/search.py": ["planner/test_search_parts.py"],
    "fald/calculus/gradients.py": ["calculus/test_gradient_parts.py", *_BATCHES],
}
